"""Backward passes of a stage: whole or cut in two, and the gradients that they bring."""
