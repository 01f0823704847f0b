"""Around one trace of a model: what it changes or draws is noticed, and undone or refused."""
