"""Grad mode, inference mode and autocast: which of them holds where.

Tracers put calls into graphs that switch these on and off. A node that is moved into a piece must find what held around it,
so the switches are not moved: each piece enters what its nodes need and leaves it as it was::

    sin                     ambient: inherited
    _set_grad_enabled(False)
    cos                     ambient: grad off
    _enter_autocast(...)
    mm                      ambient: grad off, autocast 1
    _exit_autocast
    _set_grad_enabled(True)
    add                     ambient: grad on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from partita._torch.regions import ENTER_AUTOCAST, ENTER_INFERENCE, EXIT_AUTOCAST, EXIT_INFERENCE, SET_GRAD
from partita.errors import RegionError

__all__ = ["INHERITED", "Ambient", "ambient_states"]

_EXITS = {EXIT_AUTOCAST: ENTER_AUTOCAST, EXIT_INFERENCE: ENTER_INFERENCE}


@dataclass(frozen=True, slots=True)
class Ambient:
    """The state that holds at a node.

    Attributes:
        grad: the node that last set grad mode, or None where it is as the caller left it.
        stack: the nodes whose autocast or inference region is open, outermost first.
    """

    grad: Node | None = None
    stack: tuple[Node, ...] = ()


INHERITED = Ambient()
"""Everything is as the caller left it."""


def ambient_states(nodes: Sequence[Node], switches: Sequence[int]) -> tuple[list[tuple[int, Ambient]], Ambient]:
    """The runs of nodes under one ambient state.

    Args:
        nodes: all nodes of a graph in order.
        switches: positions of the nodes that enter or leave a region, ascending.

    Returns:
        A list of (position from which the state holds, state), and the state that the graph leaves behind.

    Raises:
        RegionError: a region is left that was not entered, entered and never left, or left while an inner one is open.
    """
    state = INHERITED
    runs = [(0, state)]
    for position in switches:
        state = _after(nodes[position], state)
        runs.append((position + 1, state))
    if state.stack:
        still = ", ".join(repr(node.name) for node in state.stack)
        raise RegionError(
            f"the graph enters {still} and never leaves: add the matching exit before the output, or trace the model with the "
            "whole `with` block inside its forward"
        )
    return runs, state


def _after(node: Node, state: Ambient) -> Ambient:
    if node.target is SET_GRAD:
        return replace(state, grad=node)
    if node.target in (ENTER_AUTOCAST, ENTER_INFERENCE):
        return replace(state, stack=(*state.stack, node))
    entered = node.args[0] if node.args else None
    if not isinstance(entered, Node) or entered.target is not _EXITS[node.target]:
        raise RegionError(f"{node.name!r} leaves a region but names no node that entered one: got {entered!r}")
    if entered not in state.stack:
        raise RegionError(f"{node.name!r} leaves the region of {entered.name!r}, which is not open there: was it left before?")
    if state.stack[-1] is not entered:
        raise RegionError(
            f"{node.name!r} leaves the region of {entered.name!r} while {state.stack[-1].name!r} inside it is still open: "
            "regions must nest"
        )
    return replace(state, stack=state.stack[:-1])
