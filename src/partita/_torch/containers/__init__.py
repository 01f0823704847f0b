"""Nested containers and objects as leaves and a structure."""
