"""Running one side of a comparison, and recording what can be observed of it."""
