"""A model that is captured as a graph, cut, with the proof that nothing is lost."""
