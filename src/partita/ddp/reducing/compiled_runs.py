"""Runs of compiled graphs whose backward pass is still to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

import torch

from partita._torch.autograd.running_pass import leaves_after, will_reach

__all__ = ["CompiledRuns"]


class CompiledRuns:
    """Their autograd nodes, and the parameters that each hands gradients to.

    Args:
        parameters: those that count.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._nodes: list[ref[Any]] = []

    def add(self, node: Any) -> None:
        """Note that a compiled graph has run, whose backward pass is ``node``. Twice does no harm."""
        self._nodes = [other for other in self._nodes if other() not in (None, node)]
        self._nodes.append(ref(node))

    def indices_after(self, node: Any) -> list[int | None]:
        """Return, for each tensor that ``node`` hands a gradient to, the index of the parameter."""
        return [None if leaf is None else self._index.get(id(leaf)) for leaf in leaves_after(node)]

    def offers_to_come(self) -> Mapping[int, int]:
        """Return how many offers the backward pass that runs will bring for each parameter."""
        counts: dict[int, int] = {}
        for reference in self._nodes:
            node = reference()
            if node is not None and will_reach(node):
                for index in self.indices_after(node):
                    if index is not None:
                        counts[index] = counts.get(index, 0) + 1
        return counts
