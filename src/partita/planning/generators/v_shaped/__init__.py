"""Schedules of a V of stages, two a rank."""
