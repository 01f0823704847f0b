"""What goes where in a split, decided before anything is built."""
