"""Parameters that several stages hold."""
