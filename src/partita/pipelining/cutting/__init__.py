"""From a model to a `Pipe`: where it is cut, what may not be cut through, the proof that nothing is lost."""
