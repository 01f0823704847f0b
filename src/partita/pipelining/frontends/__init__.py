"""From a model to a `Pipe`."""
