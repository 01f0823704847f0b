"""A region as a module that is recorded once for each kind of call."""
