"""``torch.distributed``: groups, data parallel wrappers, checkpoints."""
