"""Gradients in buckets, averaged over all ranks while the backward pass runs."""
