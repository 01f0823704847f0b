"""Grad mode, inference mode and autocast: which of them is in force at each node.

Terms:
    switch: a node that sets grad mode, or enters or leaves an inference or autocast region. Tracers put them
        into graphs.
    ambient state: what the switches before a node have set. A node that is moved into a piece must run under
        the same state, so switches are not moved: each piece enters what its nodes need, and restores at its
        end what it found.
    inherited: as the caller of the graph has it.

::

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

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from partita._torch.autograd.region_switches import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD,
)
from partita.errors import RegionError

__all__ = ["INHERITED", "Ambient", "ambient_states"]

_EXITS = {EXIT_AUTOCAST: ENTER_AUTOCAST, EXIT_INFERENCE: ENTER_INFERENCE}


@dataclass(frozen=True, slots=True)
class Ambient:
    """The ambient state at a node.

    Attributes:
        grad: the switch that last set grad mode within the innermost open inference region (or within the
            graph, where none is open); None where none did.
        stack: the switches whose autocast or inference region is open, outermost first.
        outside: for each region in ``stack``, `grad` where it was entered. Leaving an inference region
            restores that.
    """

    grad: Node | None = None
    stack: tuple[Node, ...] = ()
    outside: tuple[Node | None, ...] = ()

    @property
    def switches(self) -> tuple[Node, ...]:
        """All switches that this state depends on."""
        nodes = (self.grad, *self.outside, *self.stack)
        return tuple(dict.fromkeys(node for node in nodes if node is not None))


INHERITED = Ambient()
"""Everything is as the caller has it."""


def ambient_states(
    nodes: Sequence[Node], switches: Sequence[int]
) -> tuple[list[tuple[int, Ambient]], Ambient]:
    """Return the ambient states of a graph.

    Args:
        nodes: all nodes of a graph in order.
        switches: positions of the switches, ascending.

    Returns:
        A list of (first position, state), and the state that the graph leaves behind.

    Raises:
        RegionError: a region is left that was not entered, entered and never left, or left while an inner
            one is open.
    """
    state = INHERITED
    runs = [(0, state)]
    for position in switches:
        restored = _restored_state(nodes[position], nodes, runs)
        if restored is not None and restored.stack == state.stack:
            state = replace(state, grad=restored.grad)
        else:
            state = _after(nodes[position], state)
        runs.append((position + 1, state))
    if state.stack:
        still = ", ".join(repr(node.name) for node in state.stack)
        raise RegionError(
            f"the graph enters {still} and never leaves: add the matching exit before the output, or trace "
            "the model with the whole `with` block inside its forward"
        )
    return runs, state


def _restored_state(node: Node, nodes: Sequence[Node], runs: Sequence[tuple[int, Ambient]]) -> Ambient | None:
    """The state at an earlier ``is_grad_enabled`` whose value ``_set_grad_enabled`` restores, else None."""
    source = node.args[0] if node.target is SET_GRAD and node.args else None
    if not isinstance(source, Node) or source.target is not torch.is_grad_enabled:
        return None
    run = bisect_right(runs, nodes.index(source), key=lambda entry: entry[0]) - 1
    return runs[run][1]


def _after(node: Node, state: Ambient) -> Ambient:
    """The state after a switch."""
    # Setting grad mode, or entering a region.
    if node.target is SET_GRAD:
        return replace(state, grad=node)
    if node.target in (ENTER_AUTOCAST, ENTER_INFERENCE):
        # inference mode sets grad mode too
        grad = state.grad if node.target is ENTER_AUTOCAST else None
        return Ambient(grad, (*state.stack, node), (*state.outside, state.grad))
    # Leaving the innermost region; any other one is an error.
    entered = node.args[0] if node.args else None
    if not isinstance(entered, Node) or entered.target is not _EXITS[node.target]:
        raise RegionError(
            f"{node.name!r} leaves a region but names no node that entered one: got {entered!r}"
        )
    if entered not in state.stack:
        raise RegionError(
            f"{node.name!r} leaves the region of {entered.name!r}, which is not open there: "
            "was it left before?"
        )
    if state.stack[-1] is not entered:
        raise RegionError(
            f"{node.name!r} leaves the region of {entered.name!r} while "
            f"{state.stack[-1].name!r} inside it is still open: regions must nest"
        )
    grad = state.grad if node.target is EXIT_AUTOCAST else state.outside[-1]
    return Ambient(grad, state.stack[:-1], state.outside[:-1])
