"""Where a search cuts: by work, by memory, and why."""
