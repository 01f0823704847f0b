"""Microbatches of one batch whose writes are counted one by one.

Autograd counts writes to a tensor together with those to everything that is a view of the same one, and
refuses to go back through what was written to since it was saved. So where a model writes to its input, the
forward pass of one microbatch would spoil the backward pass of another, though their memory is apart::

    batch          [ microbatch 0 | microbatch 1 ]    one count of writes
    microbatch 0     F (writes, saves)                B (finds that the batch was written to)
    microbatch 1                        F (writes)

Uncut, each goes back before the next one comes. Here each gets a count of its own, on the same memory, so
that the caller's batch is written to as it is uncut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from partita._torch.containers.pytree import flatten, tree_map
from partita._torch.tensors.storage import has_memory, storage_key
from partita._torch.tensors.versions import times_written

__all__ = ["SeparateWrites"]


class SeparateWrites:
    """The arguments of one step's microbatches, each tensor with its own count of writes where it shares no
    element with another one; where it does, or gradients go to it, it is the caller's own.

    Args:
        microbatches: the arguments of each, by name; tensors, or what is registered to hold some.

    Attributes:
        arguments: the same, with such tensors.
    """

    def __init__(self, microbatches: Sequence[Mapping[str, Any]] = ()) -> None:
        self.arguments: Sequence[Mapping[str, Any]] = microbatches
        self._own: list[tuple[Tensor, Tensor, int]] = []
        by_storage: dict[int, list[Tensor]] = {}
        if len(microbatches) > 1:
            for value in chain.from_iterable(one.values() for one in microbatches):
                for leaf in (value,) if isinstance(value, Tensor) else flatten(value)[0]:
                    if isinstance(leaf, Tensor):
                        by_storage.setdefault(storage_key(leaf), []).append(leaf)
        instead: dict[int, Tensor] = {}
        for tensors in by_storage.values():
            if len(tensors) > 1 and all(map(_is_plain, tensors)) and _are_apart(tensors):
                for tensor in tensors:
                    own = instead[id(tensor)] = tensor.data
                    self._own.append((tensor, own, times_written(own)))
        if instead:

            def own_of(value: Any) -> Any:
                if isinstance(value, Tensor):  # nearly always; trees take long
                    return instead.get(id(value), value)
                return tree_map(lambda leaf: instead.get(id(leaf), leaf), value)

            self.arguments = [{name: own_of(value) for name, value in one.items()} for one in microbatches]

    def count(self) -> None:
        """Let the caller's batch count as written to where a microbatch of it was."""
        for tensor, own, times in self._own:
            if times_written(own) != times:
                torch.autograd.graph.increment_version(tensor)
        self._own = []


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_inference()
        and has_memory(tensor)
    )


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two of them lie between each other's first and last element."""
    spans = sorted(map(_span, tensors))
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of that behind its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (steps + 1) * tensor.element_size()
