"""One stage as a rank runs it: forward and backward of one microbatch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.export import Signature
from partita._torch.pytree import tree_map
from partita.errors import ExecutionError, SignatureMismatch
from partita.pipelining.routes import Named, Routes, Tied, accept, describe
from partita.runtime import Comm

__all__ = ["PipelineStage", "detached"]


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass.

    Attributes:
        leaves: what the stage was given, as it saw it: where gradients arrive.
        outputs: what it made.
        sources: the caller's own tensors that want a gradient (stage 0 only).
    """

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor]
    sources: dict[str, Tensor]


class PipelineStage:
    """A stage's module with what it needs to know about its neighbours. Made by ``Pipe.build_stage``.

    Attributes:
        module: the stage; move it, wrap or compile it, give its parameters to an optimizer.
        index: which stage it is.
        routes: what crosses all the borders of the pipeline.
        signature: how the model's arguments and results are flattened.
        comm: what the ranks talk through; None: made from the default process group.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        routes: Routes,
        signature: Signature,
        *,
        comm: Comm | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self.routes = routes
        self.signature = signature
        self.comm = comm
        self.border = routes.borders[index]
        self._held = module  # stays when the user wraps `module`
        self._names = {
            group: next(name for name in group.names if _has_parameter(module, name))
            for group in routes.tied
            if index in group.stages
        }
        extra = dict.fromkeys(routes.result_names if self.is_last else ()).keys() - {*self.border.outputs}
        self._takes = tuple(dict.fromkeys((*self.border.inputs, *sorted(extra))))
        self._inputs = frozenset(value.name for value in routes.inputs)
        self._flights: dict[int, _Flight] = {}

    @property
    def num_stages(self) -> int:
        """How many stages the whole pipeline has."""
        return self.routes.stages

    @property
    def is_first(self) -> bool:
        """Whether it is given the model's arguments."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns the model's results."""
        return self.index == self.routes.stages - 1

    @property
    def in_flight(self) -> int:
        """How many microbatches are between forward and backward."""
        return len(self._flights)

    @property
    def device(self) -> torch.device:
        """Where its parameters (or, without any, its buffers) are; the CPU where it has neither."""
        tensors = chain(self._held.parameters(), self._held.buffers())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def parameter(self, group: Tied) -> nn.Parameter:
        """Its copy of a tied parameter."""
        return self._held.get_parameter(self._names[group])

    def accept(self, flat: Sequence[Any], microbatch: int, *, train: bool) -> dict[str, Tensor]:
        """The tensors among the model's flat arguments for one microbatch, by name.

        Raises:
            SignatureMismatch: a shape, dtype or constant that the pipeline was not cut for, or a tensor that
                wants a gradient where the example did not.
        """
        accept(self.routes.inputs, flat, f"microbatch {microbatch}")
        found = {}
        for expected, value in zip(self.routes.inputs, flat, strict=True):
            if not isinstance(value, Tensor):
                continue
            wants = train and value.requires_grad
            if wants and not getattr(expected, "requires_grad", False):
                raise SignatureMismatch(
                    f"the input {expected.name!r} wants a gradient, but the pipeline was cut with an example "
                    "that does not: detach it, or cut with an example that requires grad"
                )
            found[expected.name] = value
        return found

    def forward(self, microbatch: int, values: Mapping[str, Tensor], *, train: bool) -> dict[str, Tensor]:
        """Run one microbatch.

        Args:
            values: the tensors that the stage is given, by name.
            train: keep what the backward pass needs.

        Returns:
            What the stage makes, and on the last one also what it only hands out, by name.

        Raises:
            SignatureMismatch: an output of another shape, dtype or gradient flag than the others expect.
        """
        if train:
            self._check_tied()
        leaves = {name: self._leaf(name, values[name], train) for name in self._takes}
        result = self.module(*(self._given(name, leaves[name]) for name in self.border.inputs))
        names = self.border.outputs
        outputs = dict(zip(names, (result,) if len(names) == 1 else result, strict=True))
        for name, value in outputs.items():
            self._check(name, value, train)
        outputs |= {name: outputs[name].clone() for name in self.border.reused}
        if train:
            sources = {name: value for name, value in values.items() if value.requires_grad}
            self._flights[microbatch] = _Flight(leaves, outputs, sources)
        return leaves | outputs

    def assemble(self, made: Mapping[str, Tensor]) -> Any:
        """What the model returns, from what `forward` of the last stage returned."""
        flat = [made[item.name] if isinstance(item, Named) else item for item in self.routes.results]
        return self.signature.unflatten(flat)

    def backward(
        self, microbatch: int, gradients: Mapping[str, Tensor], loss: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Tensor | None]:
        """Gradients of one microbatch.

        Args:
            gradients: by name: of the stage's outputs; of its inputs where later users sent their share; of
                tied parameters.
            loss: the loss, and the weight that its gradient starts with.

        Returns:
            The gradients of the stage's inputs and of tied parameters that an earlier stage owns, by name;
            None for one that the loss does not depend on.
        """
        flight = self._flights.pop(microbatch)
        roots, seeds = _seeds({**flight.outputs, **flight.leaves}, gradients)
        if loss is not None:
            if not loss[0].requires_grad:
                raise ExecutionError(
                    "the loss does not depend on any parameter that is trained: unfreeze one, or call eval()"
                )
            roots, seeds = [loss[0], *roots], [loss[1], *seeds]
        groups = [group for group in self._names if group.value.requires_grad]
        shares = [_Share(group, self.parameter(group), self.index) for group in groups]
        for share in shares:
            share.begin()
            if share.name in gradients:
                roots.append(share.parameter)
                seeds.append(gradients[share.name])
        try:
            if roots:
                torch.autograd.backward(roots, seeds)
        finally:
            results: dict[str, Tensor | None] = {
                share.name: share.end() for share in shares if not share.owned
            }
        results |= {name: leaf.grad for name, leaf in flight.leaves.items() if leaf.requires_grad}
        _hand_to_caller(flight.sources, {**gradients, **results})
        return results

    def forget(self) -> None:
        """Drop all microbatches in flight (after a failure)."""
        self._flights.clear()

    def _leaf(self, name: str, value: Tensor, train: bool) -> Tensor:
        """The value cut off from its history, so that its gradient stops here."""
        expected = self.routes.values.get(name)
        wants = expected.requires_grad if expected is not None else value.requires_grad
        return value.detach().requires_grad_(train and wants)

    def _given(self, name: str, leaf: Tensor) -> Tensor:
        """What the module gets: a copy of what it writes to, since autograd refuses to write to a leaf and
        the memory is the sender's where both stages are on one rank. What the caller gave is the caller's to
        see.
        """
        own = name in self._inputs and not leaf.requires_grad
        return leaf.clone() if name in self.border.written and not own else leaf

    def _check(self, name: str, value: Any, train: bool) -> None:
        """What leaves the stage must be what the others made room for."""
        expected = self.routes.values.get(name)
        if expected is None:
            return
        if not expected.fits(value) or (train and value.requires_grad != expected.requires_grad):
            raise SignatureMismatch(
                f"stage {self.index} makes {name}: {describe(value)}, but the pipeline was cut for "
                f"{expected.describe()}: run it with the shapes, the autocast and the frozen parameters that "
                "it was cut with, or cut it again"
            )

    def _check_tied(self) -> None:
        for group in self._names:
            if self.parameter(group).requires_grad != group.value.requires_grad:
                was = "trained" if group.value.requires_grad else "frozen"
                raise SignatureMismatch(
                    f"the tied parameter {group.names[0]!r} was {was} when the pipeline was cut, and is not "
                    "now: cut it again"
                )


class _Share:
    """This stage's part of a tied parameter's gradient for one microbatch, kept apart from what lies in
    ``.grad`` already.

    The stage that comes first owns the sum: the shares arrive there along the chain, and only there are they
    added to ``.grad``.
    """

    def __init__(self, group: Tied, parameter: nn.Parameter, stage: int) -> None:
        self.name = group.value.name
        self.parameter = parameter
        self.owned = group.stages[0] == stage
        self._before: Tensor | None = None

    def begin(self) -> None:
        if not self.owned:
            self._before, self.parameter.grad = self.parameter.grad, None

    def end(self) -> Tensor | None:
        share, self.parameter.grad = self.parameter.grad, self._before
        return share


def detached(tree: Any) -> Any:
    """The same nested value with every tensor cut off from its history."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _seeds(
    values: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The values that have a gradient from elsewhere, and those gradients."""
    known = [name for name, value in values.items() if name in gradients and value.requires_grad]
    return [values[name] for name in known], [gradients[name] for name in known]


def _hand_to_caller(sources: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
    """Let the gradients of the model's own inputs flow on to where the caller has them from."""
    for name, source in sources.items():
        gradient = gradients.get(name)
        if gradient is not None:
            torch.autograd.backward(source, gradient)


def _has_parameter(module: nn.Module, name: str) -> bool:
    try:
        module.get_parameter(name)
    except AttributeError:
        return False
    return True
