"""A microbatch between its forward and its backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from partita._torch.autograd.engine import let_go_of_leaves
from partita._torch.autograd.region_switches import is_any_autocast_enabled
from partita._torch.autograd.running_pass import takes_gradient
from partita._torch.containers.pytree import tree_map
from partita._torch.modules.contents import has_global_hooks
from partita.errors import ExecutionError
from partita.pipelining.recompute.checkpointed_pass import CheckpointedPass

__all__ = ["Flight", "as_called", "detached", "hand_to_caller", "leaf_of", "let_go_of_inputs", "roots_of"]

_Name = TypeVar("_Name", str, int)


@dataclass(slots=True)
class Flight:
    """What a stage keeps of one microbatch.

    Attributes:
        leaves: the stage's inputs, detached: where gradients arrive.
        outputs: what it returned.
        sources: the caller's own tensors that require a gradient (stage 0 only).
        hooked: whether hooks were registered during the forward pass.
        loss: the last stage's loss, and the gradient that it starts with.
        checkpointed: the forward pass, where it runs again before the backward pass.
    """

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor]
    sources: dict[str, Tensor]
    hooked: bool
    loss: tuple[Tensor, Tensor] | None = None
    checkpointed: CheckpointedPass | None = None


def leaf_of(value: Tensor, *, wants_gradient: bool, leaf_uncut: bool = False) -> Tensor:
    """A value as a stage takes it: cut off from its history, so that gradients stop here.

    Autocast takes a leaf for a weight, and converts it once for all that use it, whose gradients are then
    summed in low precision. A value that comes from another stage is no leaf in the uncut model, where each
    use converts it. So it is a view here, which autocast does not keep.

    Args:
        leaf_uncut: whether it is a leaf there too: an input of the model.
    """
    leaf = value.detach()
    if not wants_gradient:
        return leaf
    is_cast = is_any_autocast_enabled() and torch.is_autocast_enabled(leaf.device.type)
    if is_cast and not leaf_uncut and leaf.layout is torch.strided:
        with torch.no_grad():
            leaf = leaf.view_as(leaf)
    return leaf.requires_grad_()


def as_called(
    leaves: Mapping[_Name, Tensor], sources: Mapping[_Name, Tensor], *, is_first: bool
) -> Mapping[_Name, Tensor]:
    """A stage's inputs as its module is called with them, where it was called with ``sources``.

    Where hooks see the calls of all modules they are no leaves, as in the uncut model: a hook that asks
    whether the running pass will come by (``register_multi_grad_hook``, which ``FlopCounterMode`` sets) must
    not ask that of a leaf whose gradient the pass returns. The caller's own leaves are there, too.
    """
    if not has_global_hooks():
        return leaves
    return {
        name: leaf.view_as(leaf) if leaf.requires_grad and not (is_first and sources[name].is_leaf) else leaf
        for name, leaf in leaves.items()
    }


def roots_of(flight: Flight, gradients: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """What a backward pass starts from: the loss, and the values that other stages sent a gradient of."""
    roots, seeds = [], []
    if flight.loss is not None:
        if not flight.loss[0].requires_grad:
            raise ExecutionError(
                "the loss does not depend on any parameter that is trained: unfreeze one, or call eval()"
            )
        roots.append(flight.loss[0])
        seeds.append(flight.loss[1])
    for values in (flight.outputs, flight.leaves):
        for name, value in values.items():
            if name in gradients and takes_gradient(value):
                roots.append(value)
                seeds.append(gradients[name])
    return roots, seeds


def hand_to_caller(sources: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
    """Pass the gradients of the model's inputs on, through the graph that the caller made them by."""
    names = [name for name in sources if gradients.get(name) is not None]
    if names:  # together: they may come from one graph, which can go back only once
        torch.autograd.backward([sources[name] for name in names], [gradients[name] for name in names])


def let_go_of_inputs(flight: Flight, gradients: Mapping[str, Tensor | None]) -> None:
    """Free the stage's inputs once I has their gradients: what W keeps of the graph has them all, though W
    may need none. One without a gradient is not in the graph by its own node, and whoever has it needs it.
    """
    leaves = [leaf for name, leaf in flight.leaves.items() if gradients.get(name) is not None]
    flight.leaves.clear()
    let_go_of_leaves(leaves)


def detached(tree: Any) -> Any:
    """The same nested value with every tensor cut off from its history."""
    if isinstance(tree, Tensor):
        return tree.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)
