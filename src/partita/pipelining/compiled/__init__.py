"""Compiled stages: forward, and a backward graph that is cut into I and W."""
