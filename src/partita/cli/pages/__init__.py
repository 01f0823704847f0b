"""What the pages of `partita plan` and `partita split` are made of."""
