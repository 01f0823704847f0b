"""The hooks by which autograd tells of the gradients that it adds to ``grad``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from partita.ddp.reducing.pass_errors import refuse_compiled_autograd

__all__ = ["hooks_on"]


class _Listener(Protocol):
    def accumulates(self, index: int) -> None:
        """Gradient number ``index`` is about to be added."""

    def accumulated(self, index: int) -> None:
        """It has been."""


def hooks_on(accumulators: Sequence[Node], listener: _Listener) -> list[RemovableHandle]:
    """Let ``listener`` hear of each node: in front of the parameters' own hooks, and behind those, which may
    change ``grad``. The hooks do not keep it alive.
    """
    listening = ref(listener)
    return [
        handle
        for index, node in enumerate(accumulators)
        for handle in (
            node.register_prehook(partial(_accumulates, listening, index)),
            node.register_hook(partial(_accumulated, listening, index)),
        )
    ]


def _accumulates(listening: ref[_Listener], index: int, _gradient: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        refuse_compiled_autograd()
    listener = listening()
    if listener is not None:
        listener.accumulates(index)


def _accumulated(listening: ref[_Listener], index: int, _none: Any, _gradient: Any) -> None:
    listener = listening()
    if listener is not None:
        listener.accumulated(index)
