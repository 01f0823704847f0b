"""The smallest parts that a captured graph can be cut into, and what they cost."""
