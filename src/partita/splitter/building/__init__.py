"""The graphs of the pieces, and the one that calls them."""
