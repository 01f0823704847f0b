"""The checks behind `partita verify`."""
