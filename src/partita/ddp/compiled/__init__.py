"""The backend for ``torch.compile``: a backward graph that is cut where buckets are full."""
