"""Where to cut: consecutive units into stages, gradients into buckets."""
