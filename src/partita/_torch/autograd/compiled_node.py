"""The autograd node of a compiled graph, whose backward pass can run in two halves.

Whoever wants the first half says so on the node (`ask`); what runs the node's graph reads it (`asked`), and
leaves the second half there (`leave`), which runs when it is time (`second_half`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge

from partita._torch.autograd.engine import leaf_of
from partita._torch.autograd.running_pass import at_end_of_pass, compiled_nodes, current_node

__all__ = [
    "SecondHalf",
    "ask",
    "asked",
    "hide_missing",
    "in_halves",
    "leave",
    "mark",
    "prepare",
    "second_half",
    "site_of_node",
]

SecondHalf: TypeAlias = Callable[[], Iterator[tuple[int, Tensor]]]
"""Computes the other gradients: the number of the node's edge, and the gradient for it."""


def mark(outputs: Sequence[Any], first_site: int = 0) -> None:
    """Note on the nodes of compiled graphs, from which these outputs come, that they run in halves, and that
    they are told which of their outputs have no gradient.

    Args:
        first_site: from which number the sites of random calls count in them.
    """
    for node in compiled_nodes(outputs):
        prepare(node, first_site)


def prepare(node: Any, first_site: int) -> None:
    """`mark` one node."""
    node.set_materialize_grads(False)
    node.partita_site = first_site
    node.partita_wanted = None
    node.partita_second, node.partita_following = None, ()


def in_halves(node: Any) -> bool:
    """Whether a node is marked."""
    return hasattr(node, "partita_wanted")


def ask(node: Any, edges: frozenset[int] | None) -> None:
    """Let the next run of a marked node compute the gradients for these of its edges only; None: for all."""
    node.partita_wanted = edges


def asked() -> frozenset[int] | None:
    """What the node that this thread runs was asked for."""
    return getattr(current_node(), "partita_wanted", None)


def site_of_node() -> int:
    """The ``first_site`` of the node that this thread runs."""
    site: int = getattr(current_node(), "partita_site", 0)
    return site


def leave(second: SecondHalf | None) -> None:
    """Leave the second half, if there is one, with the node that this thread runs."""
    node = current_node()
    # torch 2.11 forgets where a node's gradients go once it has run
    node.partita_second, node.partita_following = second, () if second is None else node.next_functions
    node.partita_wanted = None


def second_half(node: Any) -> Iterator[tuple[GradientEdge, Tensor]]:
    """Run the second half of a node: where its gradients go, and they. Nothing where the node did not run."""
    second, node.partita_second = node.partita_second, None
    following, node.partita_following = node.partita_following, ()
    if second is not None:
        for number, gradient in second():
            child, place = following[number]
            if child is not None:
                yield GradientEdge(child, place), gradient


def hide_missing(edges: Sequence[int]) -> None:
    """Keep it from hooks, until the pass ends, that the node that this thread runs has no gradient for the
    leaves behind these of its edges. Uncompiled, no node that leads there would run, and no hook; the engine
    calls those of a leaf with None.
    """
    following = current_node().next_functions
    for edge in edges:
        child, _ = following[edge]
        hooks = None if child is None else getattr(leaf_of(child), "_backward_hooks", None)
        if hooks:
            shown = {key: hook for key, hook in hooks.items() if not isinstance(hook, _UnlessMissing)}
            hooks.update({key: _UnlessMissing(hook) for key, hook in shown.items()})
            at_end_of_pass(partial(_show_again, hooks, shown))


class _UnlessMissing:
    """A hook that is called with gradients only."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self._hook(gradient)


def _show_again(hooks: dict[int, Any], shown: dict[int, Any]) -> None:
    hooks.update({key: hook for key, hook in shown.items() if key in hooks})
