"""Leaving a function mode for a while, whatever modes were entered after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.overrides
from torch.overrides import TorchFunctionMode

__all__ = ["suspended"]


@contextmanager
def suspended(mode: TorchFunctionMode) -> Iterator[None]:
    """In this block functions of torch do not pass through ``mode``; those entered after it stay on.

    Args:
        mode: one that is on; of one that is not, nothing changes.
    """
    stack = [id(entered) for entered in torch.overrides._get_current_function_mode_stack()]
    above = stack[::-1].index(id(mode)) if id(mode) in stack else None
    if above is None:
        yield
        return
    others = [torch.overrides._pop_mode() for _ in range(above)]
    torch.overrides._pop_mode()
    _push(others)
    try:
        yield
    finally:
        for _ in others:
            torch.overrides._pop_mode()
        _push([*others, mode])


def _push(modes: list[TorchFunctionMode]) -> None:
    """Enter them again, the last one first."""
    for mode in reversed(modes):
        torch.overrides._push_mode(mode)
