"""The backward pass of a module, whole and in two halves, under the names of
``torch.distributed.pipelining._backward``, for programs with stages of their own that change the import.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, flatten_up_to
from partita.pipelining.stages.arrivals import Arrivals
from partita.pipelining.stages.split_backward import WeightPass, input_pass

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]

_Gradients = tuple[Tensor | None, ...]


def stage_backward(stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> _Gradients:
    """The whole backward pass: adds to ``.grad`` of the parameters.

    Args:
        stage_output: what the module returned, nested as it likes.
        output_grads: the gradient of each tensor in it, nested likewise, or None for one that has none. Of a
            0-d loss: None.
        input_values: what the module was given.

    Returns:
        The gradient of each of ``input_values``, taken out of its ``.grad``; None where there is none.
    """
    outputs, _ = flatten(stage_output)
    given = flatten_up_to(
        output_grads, stage_output, lambda value: value is None or isinstance(value, Tensor)
    )
    roots, seeds = _starts(outputs, given)
    leaves = _leaves(input_values)
    arrivals = Arrivals(leaves)
    if roots:
        torch.autograd.backward(roots, seeds)
    gradients = _placed(input_values, leaves, arrivals.gradients())
    for leaf in leaves:
        leaf.grad = None
    return gradients


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[nn.Parameter],  # noqa: ARG001 - torch's
) -> tuple[_Gradients, list[WeightPass]]:
    """The first half: gradients of the inputs, which are added to their ``.grad`` too. The outputs keep their
    history (there: they lose it, and a module that needs one of them in its own backward pass fails).

    Args:
        output_grads: one for each output; None: ones.
        weights: have no effect: those that the outputs depend on are found.

    Returns:
        The gradient of each of ``input_values``, None where there is none; and what `stage_backward_weight`
        takes.
    """
    if output_grads is None:
        output_grads = [torch.ones_like(output) for output in stage_outputs_or_loss]
    roots, seeds = _starts(stage_outputs_or_loss, output_grads)
    leaves = _leaves(input_values)
    found = input_pass(roots, seeds, leaves)
    for leaf, gradient in zip(leaves, found.gradients, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return _placed(input_values, leaves, found.gradients), [found.weights]


def stage_backward_weight(
    weights: Iterable[nn.Parameter],
    param_groups: Iterable[WeightPass],
    retain_graph: bool = False,  # noqa: ARG001 - torch's
) -> _Gradients:
    """The second half: adds to ``.grad`` of the parameters.

    Args:
        param_groups: from `stage_backward_input`; used once.
        retain_graph: has no effect.

    Returns:
        What is in ``.grad`` of each of ``weights`` then.
    """
    for rest in param_groups:
        rest.run()
    return tuple(weight.grad for weight in weights)


def _starts(outputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a pass starts from, and the gradient of each: of a number, 1 if none is given."""
    roots, seeds = [], []
    for output, gradient in zip(outputs, gradients, strict=True):
        if not isinstance(output, Tensor) or not output.requires_grad:
            continue
        if gradient is None and output.dim() == 0:
            gradient = torch.ones_like(output)
        if gradient is not None:
            roots.append(output)
            seeds.append(gradient)
    return roots, seeds


def _leaves(values: Sequence[Any]) -> list[Tensor]:
    """Each of the tensors whose gradients are wanted, once."""
    wanted = {
        id(value): value
        for value in values
        if isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    }
    return list(wanted.values())


def _placed(
    values: Sequence[Any], leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> _Gradients:
    of = {id(leaf): gradient for leaf, gradient in zip(leaves, gradients, strict=True)}
    return tuple(of.get(id(value)) for value in values)
