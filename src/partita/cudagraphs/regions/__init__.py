"""Which nodes are captured together, and which can't be."""
