"""``torch.export``: tracing a model, and what is watched while it is traced."""
