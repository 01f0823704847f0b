"""Schedules as data: actions, their order, and what is wrong with one."""
