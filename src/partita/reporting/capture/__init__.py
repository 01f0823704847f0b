"""What `torch.compile` captured of a model, and what it ran as Python."""
