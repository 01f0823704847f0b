"""What one node does to the world: the common currency of the effect rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

__all__ = ["PLAIN", "Rule", "Use", "nodes_in", "opaque"]


@dataclass(frozen=True, slots=True)
class Use:
    """The effects of one node, as far as they are known.

    Attributes:
        writes: operands whose storage is (or may be) changed.
        aliases: operands whose storage the result may share.
        state: tensors that a called module holds and reads.
        written_state: those of them that it changes (running statistics).
        random: draws from a random generator.
        host: has a side effect that the host can see (prints, raises, changes a Python object).
        barrier: changes interpreter-wide state; nothing may cross it.
        entangles: afterwards any operand may hold, or lie on the storage of, any other.
        why: the reason, for a report.
    """

    writes: tuple[Node, ...] = ()
    aliases: tuple[Node, ...] = ()
    state: tuple[torch.Tensor, ...] = ()
    written_state: tuple[torch.Tensor, ...] = ()
    random: bool = False
    host: bool = False
    barrier: bool = False
    entangles: bool = False
    why: str = ""

    @property
    def unknown(self) -> bool:
        """Whether this is code that nothing is known of: it may also have kept what it was given before."""
        return self.entangles and self.host

    @property
    def observable(self) -> bool:
        """Whether running the node can be observed other than by its result."""
        return bool(self.writes or self.written_state or self.random or self.host or self.barrier)


Rule = Callable[[Node], Use]
"""From a node to its effects. A rule is looked up once per target and applied once per node."""

PLAIN = Use()
"""Computes a fresh value and does nothing else."""


def nodes_in(value: object) -> tuple[Node, ...]:
    """The nodes in a nested argument, in order."""
    if isinstance(value, Node):
        return (value,)
    if isinstance(value, (list, tuple)):
        return tuple(node for item in value for node in nodes_in(item))
    if isinstance(value, dict):
        return tuple(node for item in value.values() for node in nodes_in(item))
    if isinstance(value, slice):
        return nodes_in((value.start, value.stop, value.step))
    return ()


def opaque(node: Node, why: str) -> Use:
    """What is unknown reads and writes all that it is given, may draw random numbers and be seen by the
    host.
    """
    operands = tuple(node.all_input_nodes)
    return Use(writes=operands, aliases=operands, random=True, host=True, entangles=True, why=why)
