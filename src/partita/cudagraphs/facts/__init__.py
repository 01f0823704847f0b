"""What is known of a graph before it is cut."""
