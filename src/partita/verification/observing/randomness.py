"""The generators that a model can draw from: torch's own on each device, Python's and numpy's.

A generator that is an attribute of a model is part of its state: see `snapshot`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["capture", "preserved", "same_state", "seed_all", "torch_states"]

_CPU = "CPU generator"


def capture() -> dict[str, Any]:
    """Return the state of every global generator, by name.

    >>> list(capture())[:2]
    ['CPU generator', 'Python generator']
    """
    states: dict[str, Any] = {**torch_states(), "Python generator": random.getstate()}
    numpy = _numpy()
    if numpy is not None:
        states["numpy generator"] = numpy.random.get_state()
    return states


def torch_states() -> dict[str, torch.Tensor]:
    """Return the state of torch's generator on each device, by name."""
    cuda = {f"CUDA generator {index}": torch.cuda.get_rng_state(index) for index in range(_cuda_devices())}
    return {_CPU: torch.get_rng_state(), **cuda}


def seed_all(seed: int) -> None:
    """Seed every global generator. ``seed`` is an int in [0, 2**32): numpy takes no more."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed)
    if _cuda_devices():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the present state of every global generator at the end of the block."""
    states = capture()
    try:
        yield
    finally:
        _restore(states)


def same_state(left: Any, right: Any) -> bool:
    """Return whether two states of one generator are equal."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same_state, left, right))
    if hasattr(left, "tobytes"):
        return bool(left.tobytes() == right.tobytes())
    return bool(left == right)


def _restore(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states[_CPU])
    random.setstate(states["Python generator"])
    numpy = _numpy()
    if numpy is not None and "numpy generator" in states:
        numpy.random.set_state(states["numpy generator"])
    for index in range(_cuda_devices()):
        torch.cuda.set_rng_state(states[f"CUDA generator {index}"], index)


def _numpy() -> Any:
    # numpy is optional: whoever draws from it has imported it.
    return sys.modules.get("numpy")


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
