"""What one node does besides computing its value. Every effect rule returns a `NodeEffect`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

__all__ = ["PURE", "NodeEffect", "Rule", "combined", "nodes_in", "opaque"]


@dataclass(frozen=True, slots=True)
class NodeEffect:
    """The effect of one node. Where nothing certain is known, it is what the node may do at most.

    Attributes:
        writes: operands whose storage is (or may be) changed.
        aliases: operands whose storage the result may share.
        state: tensors that a called module holds and reads.
        written_state: those of them that it changes (running statistics).
        random: draws from a random generator.
        host: has a side effect that the host can see (prints, raises, changes a Python object).
        barrier: changes interpreter-wide state; no node may be moved across it.
        entangles: afterwards any operand may contain, or share a storage with, any other.
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
        """Whether nothing is known of the code: it may also have kept what earlier calls gave it."""
        return self.entangles and self.host

    @property
    def observable(self) -> bool:
        """Whether running the node can be observed other than by its result."""
        return bool(self.writes or self.written_state or self.random or self.host or self.barrier)


Rule = Callable[[Node], NodeEffect]
"""From a node to its effects. A rule is looked up once per target and applied once per node."""

PURE = NodeEffect()
"""The node computes a fresh value and does nothing else."""


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


def combined(
    effects: Iterable[NodeEffect], writes: Iterable[Node], aliases: Iterable[Node], why: str
) -> NodeEffect:
    """Return the effect of doing all of these, to the given operands."""
    effects = tuple(effects)
    return NodeEffect(
        writes=tuple(dict.fromkeys(writes)),
        aliases=tuple(dict.fromkeys(aliases)),
        state=tuple(tensor for effect in effects for tensor in effect.state),
        written_state=tuple(tensor for effect in effects for tensor in effect.written_state),
        random=any(effect.random for effect in effects),
        host=any(effect.host for effect in effects),
        barrier=any(effect.barrier for effect in effects),
        entangles=any(effect.entangles for effect in effects),
        why=why,
    )


def opaque(node: Node, why: str) -> NodeEffect:
    """Return the effect of unknown code: it reads and writes its operands, and has every side effect."""
    operands = tuple(node.all_input_nodes)
    return NodeEffect(writes=operands, aliases=operands, random=True, host=True, entangles=True, why=why)
