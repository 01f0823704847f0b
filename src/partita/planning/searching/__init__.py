"""What `partita.planning.search` is made of; see there."""
