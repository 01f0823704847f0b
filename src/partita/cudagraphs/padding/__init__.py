"""Batches that are padded to a few sizes."""
