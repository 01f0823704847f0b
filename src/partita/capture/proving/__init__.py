"""The proof that a captured graph equals its model."""
