"""The uncut model over the same microbatches: what a pipeline's step is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.containers.pytree import tree_map
from partita._torch.export.signature import signature_of
from partita._torch.tensors.detached_copy import detached_copy
from partita.capture.open_sizes.sizes import Sizes, sizes_of
from partita.errors import ArgumentError
from partita.graph.effects import metadata
from partita.pipelining.interface.loss import OutputLoss, loss_by_name
from partita.pipelining.interface.two_modes import TwoModes
from partita.pipelining.interface.values import Constant, Value, accept
from partita.pipelining.steps.loss_weights import LossWeights, check_targets, checked_weights
from partita.pipelining.steps.preparing.precision import fresh_casts
from partita.pipelining.training.eager_model import EagerModel
from partita.runtime import RandomKey, cut_batch, keyed, merge, split_tree
from partita.runtime.example_arguments import ExampleArguments

__all__ = ["UncutReference", "graph_inputs"]


class UncutReference:
    """Runs the whole model over microbatches in order; it accumulates gradients, and draws random numbers as
    a pipeline does.

    A pipeline's step gives the same outputs, losses and gradients, bit for bit on CPU.

    Args:
        whole: the model itself; or its graph (``GraphPipe.whole`` or the result of `keyed_graph`), with which
            errors of the capture are not noticed.
        n_microbatches: into how many the batch is cut.
        loss_fn: from (output, target) to one number. Without one, the loss is what the model's output, if it
            is a dict, holds under ``"loss"``, as in a schedule.
        seed: of the random numbers.
        graph: of a model that draws random numbers: ``GraphPipe.whole``, which has the site of each draw. Its
            results are not used.
        example: what the model was cut with (``GraphPipe.example``, ``ModulePipe.example``), where a step is
            given lists that might have an entry for each sample.

    >>> import torch
    >>> from partita.pipelining import UncutReference, pipeline
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    >>> pipe = pipeline(model, (torch.randn(1, 2),), stages=2)
    >>> reference = UncutReference(model, 4, torch.nn.functional.mse_loss, graph=pipe.whole)
    >>> reference.step(torch.randn(8, 2), target=torch.randn(8, 1)).shape
    torch.Size([8, 1])
    """

    def __init__(
        self,
        whole: nn.Module,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        seed: int = 0,
        graph: nn.Module | None = None,
        example: ExampleArguments | None = None,
    ) -> None:
        self.whole = whole
        self._eager = None if isinstance(whole, (GraphModule, TwoModes)) else EagerModel(whole, graph)
        self.n_microbatches = n_microbatches
        self.loss_fn = loss_fn
        self.seed = seed
        self.example = example
        self._forward = whole.forward
        self._steps = 0

    def state_dict(self) -> dict[str, int]:
        """How many steps have been made, on which random numbers depend."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue counting from ``state``."""
        self._steps = state["steps"]

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        loss_weights: LossWeights | Sequence[float] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch; gradients are added to ``.grad``. Returns the merged output.
        Where there is no loss, it is `eval`.
        """
        return self._run(args, kwargs, target, losses, loss_weights, loss_kwargs or {}, train=True)

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Run forward of one batch without gradients. ``losses`` is filled where there is a target, and where
        the loss is the model's own.
        """
        with torch.no_grad():
            return self._run(args, kwargs, target, losses, None, {}, train=False)

    def _run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        losses: list[Tensor] | None,
        loss_weights: LossWeights | Sequence[float] | None,
        loss_kwargs: Mapping[str, Any],
        *,
        train: bool,
    ) -> Any:
        count = self.n_microbatches
        targets, rows = split_tree(target, count)
        batch = cut_batch(args, kwargs, count, example=self.example)
        if target is not None:
            check_targets(rows.sizes, batch.plan.sizes, target)
        weights = batch.plan.weights
        if loss_weights is not None:
            weights = checked_weights(loss_weights, count)
        outputs, step_losses = [], []
        for microbatch, (positional, named) in enumerate(map(batch.tree, batch.parts())):
            key = RandomKey(self.seed, self._steps, microbatch)
            with fresh_casts():
                output = self._called(positional, named, key)
            loss_fn = self.loss_fn or loss_by_name(output, _starts_gradients if train else _is_number)
            own = isinstance(loss_fn, OutputLoss) and loss_fn.is_in(output)
            if loss_fn is not None and (train or target is not None or own):
                loss = loss_fn(output, targets[microbatch], **loss_kwargs)
                if train:
                    with nullcontext() if self._eager is None else self._eager.backward_pass():
                        torch.autograd.backward(loss, torch.full_like(loss, weights[microbatch]))
                step_losses.append(loss.detach())
            outputs.append(tree_map(detached_copy, output))  # the next microbatch may write to it
        if losses is not None:
            losses[:] = step_losses
        self._steps += train and bool(step_losses)
        return merge(outputs)

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: RandomKey) -> Any:
        if self._eager is not None:
            return self._eager.call(args, kwargs, key)
        self._accept(args, kwargs, key.microbatch)
        with keyed(key):
            return self.whole(*args, **kwargs)

    def _accept(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], microbatch: int) -> None:
        whole = self.whole
        assert isinstance(whole, (GraphModule, TwoModes))
        graph, signature = (
            (whole.current, whole.signature)
            if isinstance(whole, TwoModes)
            else (whole, signature_of(whole, self._forward))
        )
        placeholders = graph.graph.find_nodes(op="placeholder")
        if placeholders and not any({"val", "example_value"} & node.meta.keys() for node in placeholders):
            raise ArgumentError(
                "the graph of the uncut model was pickled, and what it was captured with stayed behind: "
                "give the model itself (UncutReference(model, ..., graph=pipe.whole)), or that of a pipe "
                "that was not pickled"
            )
        flat, inputs = signature.flatten(args, kwargs), graph_inputs(graph)
        accept(inputs, flat, f"microbatch {microbatch}", signature)
        sizes = Sizes.of(graph)
        sizes.check(sizes_of(sizes.symbols, [value.name for value in inputs], flat), whole.training)


def graph_inputs(whole: GraphModule) -> tuple[Value | Constant, ...]:
    """The inputs of a captured graph: a tensor's shape and dtype, or the value that one was captured with."""
    sizes = Sizes.of(whole)
    return tuple(
        replace(Value.of(node.name, value, sizes), fixed=sizes.fixed)
        if isinstance(value := metadata(node), Tensor)
        else Constant(node.name, value)
        for node in whole.graph.nodes
        if node.op == "placeholder"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _starts_gradients(value: Any) -> bool:
    return _is_number(value) and value.requires_grad
