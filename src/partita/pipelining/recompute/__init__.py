"""Activation checkpointing: passes that keep their inputs and run again in the backward pass."""
