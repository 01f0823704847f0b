"""Where the tensors of a stage are: devices, memory, and the names of its state."""
