"""One step: schedules compiled into instructions that every rank replays, and what surrounds them."""
