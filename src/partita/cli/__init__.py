"""The command ``partita``."""
