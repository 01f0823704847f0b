"""Modules: what they hold, their calls, copies of them."""
