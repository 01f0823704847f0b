"""Graphs and modules around them: built, copied, pickled, and turned into code."""
