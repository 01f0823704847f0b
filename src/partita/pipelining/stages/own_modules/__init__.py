"""Stages of the user's own modules, and what they return as far as it is declared or inferred."""
