"""The frames of the model's functions that are being executed: their lines and their variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from partita._torch.fake.ghosts import caller
from partita._torch.modules.calls import watch_calls
from partita.pipelining.blocks.replaying.answers import tensors_in

__all__ = ["line_of_model", "variables_of_model"]

_BLOCKS = Path(__file__).parents[1]
_PASSES = (_BLOCKS, _BLOCKS.parent / "frontends" / "modules")
_OWN_FILES = frozenset(
    [str(path) for folder in _PASSES for path in folder.rglob("*.py")]
    + [str(module.__file__) for module in (torch.overrides, torch.functional, torch.nn.functional)]
)
"""The files whose frames stand between the model's code and a function of torch that a pass intercepts."""
_NOT_MODEL = _OWN_FILES | {nn.Module.__call__.__code__.co_filename, watch_calls.__code__.co_filename}
_START = (str(_BLOCKS / "stage_module.py"), "run_pass")


def line_of_model() -> tuple[str, int]:
    """Return the name of the model's innermost function that is being executed, and its line."""
    frame = caller(1)
    while frame is not None and frame.f_code.co_filename in _OWN_FILES:
        frame = frame.f_back
    assert frame is not None
    return frame.f_code.co_name, frame.f_lineno


def variables_of_model() -> Iterator[tuple[FrameType, str, Tensor]]:
    """Yield the tensors in variables of the model's functions that are being executed."""
    frame = caller(1)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _START:
        if frame.f_code.co_filename not in _NOT_MODEL:
            for name, value in frame.f_locals.items():
                for tensor in tensors_in(value):
                    yield frame, name, tensor
        frame = frame.f_back
