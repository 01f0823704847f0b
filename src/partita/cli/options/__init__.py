"""What users type: quantities, cuts, schedules, clusters."""
