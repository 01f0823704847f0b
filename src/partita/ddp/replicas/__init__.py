"""A replicated module: what it holds, and what it is given by rank 0."""
