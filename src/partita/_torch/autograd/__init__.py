"""Autograd: the engine, the pass that is running, and the modes that hold around a call."""
