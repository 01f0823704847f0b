"""What ranks find out, and agree on, before the first tensor of a step is sent."""
