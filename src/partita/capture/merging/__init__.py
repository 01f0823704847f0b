"""Several traces of a model become one graph: of both modes, or of both ways of a branch."""
