"""What one stage hands to the next for one microbatch, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partita._torch.containers.pytree import TreeSpec, flatten, register_leaves
from partita.pipelining.blocks.cut import Site
from partita.pipelining.blocks.replaying.answers import Answer, NewTensor
from partita.pipelining.blocks.replaying.calls_digest import CallsOfPass

__all__ = ["Gradients", "Packet", "first_packet", "sharing_memory"]


@dataclass(frozen=True, eq=False)
class Packet:
    """What crosses one border forward.

    Attributes:
        arguments: the leaves of the model's positional and keyword arguments, with a `NewTensor` for each
            tensor. These tensors have the numbers 0, 1, ...
        structure: the pytree structure of the arguments.
        tensors: how many of the leaves are tensors.
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
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            values[len(values)] = leaf
            described.append(NewTensor.of(leaf))
        else:
            described.append(leaf)
    sites = {number: ("argument", number) for number in values}
    own = tuple(values.values()) if live else ()
    return Packet(
        described,
        spec,
        len(values),
        values=values,
        sites=sites,
        generators=generators,
        live=live,
        own_arguments=own,
    )


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
