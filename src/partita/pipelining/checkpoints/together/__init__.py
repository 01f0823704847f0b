"""The ranks that save or load a checkpoint together, and the thread that writes for them."""
