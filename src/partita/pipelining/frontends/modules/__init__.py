"""A model that is cut between calls of its modules, without capturing it."""
