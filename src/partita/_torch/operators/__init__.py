"""What torch knows about its operators."""
