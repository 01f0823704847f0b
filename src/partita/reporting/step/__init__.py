"""A pipeline step: its data, its timeline, its page."""
