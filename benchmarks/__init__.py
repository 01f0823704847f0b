"""One question a file; ``partita bench NAME`` runs one."""
