"""Where a model is cut: by hand or by plan."""
