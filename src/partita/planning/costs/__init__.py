"""What parts of a model cost: time, memory, bytes that cross."""
