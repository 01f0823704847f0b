"""Shapes and dtypes without data."""
