"""A plan: its candidates, its memory, its page."""
