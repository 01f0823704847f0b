"""Where the first difference comes from."""
