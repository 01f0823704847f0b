"""What a node does besides computing its value, by the kind of its target."""
