"""What generators share: their checks, the problem to schedule, and ways to lay out its passes."""
