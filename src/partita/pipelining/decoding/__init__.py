"""Calls of a model, one after the other, whose state stays on the stages: decoding with caches."""
