"""A schedule as instructions, and the step that replays them."""
