"""``torch.compile`` and AOTAutograd: their graphs, and compilers for them."""
