"""Python's and numpy's global random generators. numpy's counts only where numpy has been imported."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from partita.runtime.rng import active_seed

__all__ = ["generator_states", "keyed_generators", "seed_generators", "set_generators"]

_HOST_SITE = 2**62
"""The call site of Python's and numpy's generators, far above those of torch's random functions."""


def generator_states() -> tuple[Any, Any]:
    """The states of Python's and numpy's global generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def set_generators(states: tuple[Any, Any]) -> None:
    """Restore what `generator_states` returned."""
    numpy = sys.modules.get("numpy")
    random.setstate(states[0])
    if numpy is not None and states[1] is not None:
        numpy.random.set_state(states[1])


def seed_generators(seed: int) -> None:
    """Seed Python's generator, and numpy's where numpy is loaded."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def keyed_generators() -> Iterator[None]:
    """Seed Python's and numpy's generators from the active `RandomKey` for this block, where there is one."""
    seed = active_seed(_HOST_SITE)
    if seed is None:
        yield
        return
    before = generator_states()
    seed_generators(seed)
    try:
        yield
    finally:
        set_generators(before)
