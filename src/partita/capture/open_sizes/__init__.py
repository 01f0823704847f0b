"""The sizes that a captured graph leaves open, such as that of the batch."""
