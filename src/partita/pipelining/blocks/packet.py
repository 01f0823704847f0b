"""What one stage hands to the next for one microbatch, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partita._torch.containers.pytree import TreeSpec, flatten, register_leaves
from partita.pipelining.blocks.cut import Site
from partita.pipelining.blocks.replaying.answers import Answer, NewTensor, NumberedTensor
from partita.pipelining.blocks.replaying.calls_digest import CallsOfPass

__all__ = ["Gradients", "Packet", "first_packet", "sharing_memory"]


@dataclass(frozen=True, eq=False)
class Packet:
    """What crosses one border forward.

    Attributes:
        arguments: the leaves of the model's positional and keyword arguments, with a `NewTensor` for each
            tensor. These tensors have the numbers 0, 1, ...; one that comes again is a `NumberedTensor`.
        structure: the pytree structure of the arguments.
        tensors: how many tensors there are among the leaves.
        answers: what all functions returned that were called before the border, in order.
        calls: these calls.
        values: tensors that later stages may need, by number.
        sites: where each of ``values`` was made.
        aliases: the numbers of those that share memory.
        generators: the states of Python's and numpy's generators at the beginning; None: they follow the
            random key.
        live: the values are still part of autograd's graph: all stages run in one process, at once.
        own_arguments: the caller's tensors, by number, where the packet is live.
    """

    arguments: Sequence[Any]
    structure: TreeSpec
    tensors: int
    answers: Sequence[Answer] = ()
    calls: CallsOfPass = field(default_factory=CallsOfPass)
    values: Mapping[int, Tensor] = field(default_factory=dict)
    sites: Mapping[int, Site] = field(default_factory=dict)
    aliases: frozenset[int] = frozenset()
    generators: Any = None
    live: bool = False
    own_arguments: tuple[Tensor, ...] = ()

    @property
    def argument_sites(self) -> list[Site]:
        """Of each of the arguments' tensors, by number: the places where it stands. One that stands in
        several is none that the example has shown to be unused.
        """
        sites: list[Site] = []
        tensors = (leaf for leaf in self.arguments if isinstance(leaf, (NewTensor, NumberedTensor)))
        for place, leaf in enumerate(tensors):
            if isinstance(leaf, NumberedTensor):
                sites[leaf.number] = (*sites[leaf.number], place)
            else:
                sites.append(("argument", place))
        return sites

    def detach(self) -> Packet:
        """Return it without autograd's graph; ``requires_grad`` of each value stays."""
        return self.with_values(
            {
                number: value.detach().requires_grad_(value.requires_grad)
                for number, value in self.values.items()
            }
        )

    def with_values(self, values: Mapping[int, Tensor]) -> Packet:
        """Return a copy with other tensors."""
        return replace(self, values=values)


@dataclass(frozen=True, eq=False)
class Gradients:
    """What crosses one border backward: the gradients of what crossed forward, by number. A value without a
    gradient is left out.
    """

    values: Mapping[int, Tensor]

    def detach(self) -> Gradients:
        """Return it without autograd's graph."""
        return Gradients({number: value.detach() for number, value in self.values.items()})

    def with_values(self, values: Mapping[int, Tensor]) -> Gradients:
        """Return a copy with other tensors."""
        return Gradients(values)


def first_packet(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, live: bool, generators: Any = None
) -> Packet:
    """Return what the first stage is handed: the model's own arguments."""
    leaves, spec = flatten((tuple(args), dict(kwargs)))
    values: dict[int, Tensor] = {}
    numbers: dict[int, int] = {}
    described: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            described.append(leaf)
        elif id(leaf) in numbers:  # the same object again, on every stage
            described.append(NumberedTensor(numbers[id(leaf)]))
        else:
            numbers[id(leaf)] = len(values)
            values[len(values)] = leaf
            described.append(NewTensor.of(leaf))
    own = tuple(values.values()) if live else ()
    packet = Packet(
        described,
        spec,
        len(values),
        values=values,
        generators=generators,
        live=live,
        own_arguments=own,
    )
    return replace(packet, sites=dict(enumerate(packet.argument_sites)))


def sharing_memory(values: Mapping[int, Tensor]) -> frozenset[int]:
    """The numbers of those tensors that share a storage with another one."""
    numbers: dict[int, list[int]] = {}
    for number, tensor in values.items():
        if tensor.layout == torch.strided:
            numbers.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
    numbers.pop(0, None)  # of those without memory
    return frozenset(number for group in numbers.values() if len(group) > 1 for number in group)


def _leaves_of(packet: Packet) -> tuple[list[Any], Any]:
    return list(packet.values.values()), (packet, tuple(packet.values))


def _with_leaves(leaves: Any, context: Any) -> Packet:
    packet, numbers = context
    return replace(packet, values=dict(zip(numbers, leaves, strict=True)))


register_leaves(Packet, _leaves_of, _with_leaves)  # fully_shard looks for tensors in what modules return
