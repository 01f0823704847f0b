"""What one stage hands to the next for one microbatch, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from partita._torch.containers.pytree import TreeSpec, flatten, register_leaves
from partita.pipelining.blocks.answers import Answer, New
from partita.pipelining.blocks.cut import Site

__all__ = ["Gradients", "Packet", "given"]


@dataclass(frozen=True, eq=False)
class Packet:
    """What crosses one border forward.

    Attributes:
        arguments: the leaves of the model's positional and keyword arguments; where a tensor is, what it
            looks like. Their numbers are 0, 1, ...
        structure: how they are put together.
        tensors: how many there are among them.
        answers: of all functions that were called before the border, in order.
        values: what later stages need, by number.
        sites: where each of those was made.
        aliases: the numbers of those that share memory.
        generators: where Python's and numpy's generators stood at the beginning; None: follow the random key.
        live: the values are still part of autograd's graph: all stages run in one process, at once.
    """

    arguments: Sequence[Any]
    structure: TreeSpec
    tensors: int
    answers: Sequence[Answer] = ()
    values: Mapping[int, Tensor] = field(default_factory=dict)
    sites: Mapping[int, Site] = field(default_factory=dict)
    aliases: frozenset[int] = frozenset()
    generators: Any = None
    live: bool = False

    def detach(self) -> Packet:
        """The same, cut off from autograd's graph; what wants a gradient still says so."""
        return self.with_values({number: _cut_off(value) for number, value in self.values.items()})

    def with_values(self, values: Mapping[int, Tensor]) -> Packet:
        """The same with other tensors."""
        return replace(self, values=values)


@dataclass(frozen=True, eq=False)
class Gradients:
    """What crosses one border backward: the gradients of what crossed forward, by number; those that are not
    there are left out.
    """

    values: Mapping[int, Tensor]

    def detach(self) -> Gradients:
        """The same, cut off from autograd's graph."""
        return Gradients({number: value.detach() for number, value in self.values.items()})

    def with_values(self, values: Mapping[int, Tensor]) -> Gradients:
        """The same with other tensors."""
        return Gradients(values)


def given(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, live: bool, generators: Any = None) -> Packet:
    """What the first stage is handed: the model's own arguments."""
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    values: dict[int, Tensor] = {}
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            values[len(values)] = leaf
            described.append(New.of(leaf))
        else:
            described.append(leaf)
    sites = {number: ("argument", number) for number in values}
    return Packet(described, spec, len(values), (), values, sites, generators=generators, live=live)


def _cut_off(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _leaves_of(packet: Packet) -> tuple[list[Any], Any]:
    return list(packet.values.values()), (packet, tuple(packet.values))


def _with_leaves(leaves: Any, context: Any) -> Packet:
    packet, numbers = context
    return replace(packet, values=dict(zip(numbers, leaves, strict=True)))


register_leaves(Packet, _leaves_of, _with_leaves)  # fully_shard looks for tensors in what modules return
