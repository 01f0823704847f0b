"""Comparing two observations."""
