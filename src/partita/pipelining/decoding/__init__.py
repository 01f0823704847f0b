"""Calls of a model, one after the other, whose state stays on the stages: decoding with caches."""

from __future__ import annotations

from partita.pipelining.decoding.model_call import ModelCall
from partita.pipelining.decoding.run_programs import run_programs

__all__ = ["ModelCall", "run_programs"]
