"""The backward pass of a module, whole and in two halves, under the names of
``torch.distributed.pipelining._backward``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, flatten_up_to
from partita.pipelining.stages.backward.arrivals import Arrivals
from partita.pipelining.stages.backward.split_backward import WeightPass, input_pass

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]

_Gradients = tuple[Tensor | None, ...]


def stage_backward(stage_output: Any, output_grads: Any, input_values: Sequence[Any]) -> _Gradients:
    """Run the whole backward pass, which adds to ``.grad`` of the parameters.

    Args:
        stage_output: what the module returned, a nested value.
        output_grads: the gradients of the tensors in it, nested alike, with None where there is none. For a
            0-d loss: None.
        input_values: the module's inputs.

    Returns:
        The gradient of each of ``input_values``, taken out of its ``.grad``; None where there is none.
    """
    outputs, _ = flatten(stage_output)
    output_gradients = flatten_up_to(
        output_grads, stage_output, lambda value: value is None or isinstance(value, Tensor)
    )
    roots, seeds = _starts(outputs, output_gradients)
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
    """Run the first half: the gradients of the inputs, which are also added to their ``.grad``. The outputs
    keep their history (torch's function detaches them, so a module that needs one in its backward fails).

    Args:
        output_grads: one for each output; None: ones.
        weights: have no effect: the weights are found in the graph of the outputs.

    Returns:
        The gradient of each of ``input_values``, None where there is none; and the ``param_groups`` of
        `stage_backward_weight`.
    """
    if output_grads is None:
        output_grads = [torch.ones_like(output) for output in stage_outputs_or_loss]
    roots, seeds = _starts(stage_outputs_or_loss, output_grads)
    leaves = _leaves(input_values)
    result = input_pass(roots, seeds, leaves)
    for leaf, gradient in zip(leaves, result.gradients, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return _placed(input_values, leaves, result.gradients), [result.weights]


def stage_backward_weight(
    weights: Iterable[nn.Parameter],
    param_groups: Iterable[WeightPass],
    retain_graph: bool = False,  # noqa: ARG001 - torch's
) -> _Gradients:
    """Run the second half, which adds to ``.grad`` of the parameters.

    Args:
        param_groups: from `stage_backward_input`; used once.
        retain_graph: has no effect.

    Returns:
        The ``.grad`` of each of ``weights`` afterwards.
    """
    for weight_pass in param_groups:
        weight_pass.run()
    return tuple(weight.grad for weight in weights)


def _starts(outputs: Sequence[Any], gradients: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a pass starts from, with their gradients; that of a 0-d output is 1 by default."""
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
    """The leaves among the values that require a gradient, each once."""
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
