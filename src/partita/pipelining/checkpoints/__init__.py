"""State by the names that the uncut model has, between any numbers of stages."""
