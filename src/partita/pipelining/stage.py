"""One stage as a rank runs it: forward and backward of one microbatch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.export import Signature
from partita._torch.pytree import tree_map
from partita.errors import SignatureMismatch
from partita.pipelining.routes import Named, Routes, Tied, describe
from partita.runtime import Comm

__all__ = ["PipelineStage", "detached"]


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass."""

    leaves: dict[str, Tensor]
    """Inputs as the module saw them: where gradients arrive."""
    outputs: dict[str, Tensor]


class PipelineStage:
    """A stage's module with what it needs to know about its neighbours. Made by ``Pipe.build_stage``.

    Attributes:
        module: the stage; move it, compile it, give its parameters to an optimizer.
        index: which stage it is.
        routes: what crosses all the borders of the pipeline.
        signature: how the model's arguments and results are flattened.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        routes: Routes,
        signature: Signature,
        *,
        device: torch.device | str | None = None,
        comm: Comm | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self.routes = routes
        self.signature = signature
        self.device = torch.device(device) if device is not None else _device_of(module)
        self.comm = comm
        self.border = routes.borders[index]
        self.tied = tuple((group, self._own(group)) for group in routes.tied if index in group.stages)
        self._flights: dict[int, _Flight] = {}

    @classmethod
    def _from_pipe(cls, *args: Any, **kwargs: Any) -> PipelineStage:
        return cls(*args, **kwargs)

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

    def forward(self, microbatch: int, values: Mapping[str, Tensor], *, train: bool) -> dict[str, Tensor]:
        """Run one microbatch.

        Args:
            values: the tensors that the stage takes, by name.
            train: keep what the backward pass needs.

        Returns:
            What the stage makes, by name.
        """
        leaves = {name: self._leaf(name, values[name], train) for name in self.border.inputs}
        result = self.module(*leaves.values())
        names = self.border.outputs
        outputs = dict(zip(names, (result,) if len(names) == 1 else result, strict=True))
        for name, value in outputs.items():
            self._check(name, value, train)
        if train:
            self._flights[microbatch] = _Flight(leaves, outputs)
        return outputs

    def assemble(self, made: Mapping[str, Tensor]) -> Any:
        """What the model returns, from the values that the last stage has."""
        flat = [made[item.name] if isinstance(item, Named) else item for item in self.routes.results]
        return self.signature.unflatten(flat)

    def accept(self, flat: Sequence[Any], microbatch: int) -> dict[str, Tensor]:
        """The model's flat arguments for one microbatch, by name.

        Raises:
            SignatureMismatch: a shape or dtype that the pipeline was not cut for.
        """
        if len(flat) != len(self.routes.inputs):
            raise SignatureMismatch(f"the model takes {len(self.routes.inputs)} inputs, got {len(flat)}")
        for expected, value in zip(self.routes.inputs, flat, strict=True):
            if expected is None:
                continue
            if not isinstance(value, Tensor) or tuple(value.shape) != expected.shape or value.dtype != expected.dtype:
                found = describe(value)
                raise SignatureMismatch(
                    f"microbatch {microbatch} brings {found} for {expected.describe()}: give batches that divide into microbatches of "
                    "the size that the pipeline was cut with, or cut it with other example arguments"
                )
        return {expected.name: value for expected, value in zip(self.routes.inputs, flat, strict=True) if expected is not None}

    def passed_on(self, microbatch: int) -> dict[str, Tensor]:
        """The values that a microbatch in flight took in, as leaves that collect gradients."""
        return self._flights[microbatch].leaves

    def backward(
        self, microbatch: int, gradients: Mapping[str, Tensor], loss: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Gradients of one microbatch.

        Args:
            gradients: by name: of the stage's outputs; of its inputs where later users sent their share; of tied parameters.
            loss: the loss, and the weight that its gradient starts with.

        Returns:
            The gradients of the stage's inputs and of tied parameters that an earlier stage owns, by name.
        """
        flight = self._flights.pop(microbatch)
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        if loss is not None:
            roots.append(loss[0])
            seeds.append(loss[1])
        for name, value in (*flight.outputs.items(), *flight.leaves.items()):
            if name in gradients and value.requires_grad:
                roots.append(value)
                seeds.append(gradients[name])
        shares = [_Share(group, parameter, self.index) for group, parameter in self.tied if parameter.requires_grad]
        for share in shares:
            share.begin()
            if share.name in gradients:
                roots.append(share.parameter)
                seeds.append(gradients[share.name])
        try:
            if roots:
                torch.autograd.backward(roots, seeds)
        finally:
            results = {share.name: gradient for share in shares if (gradient := share.end()) is not None}
        for name, leaf in flight.leaves.items():
            if leaf.requires_grad:
                results[name] = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        return results

    def forget(self) -> None:
        """Drop all microbatches in flight (after a failure)."""
        self._flights.clear()

    def _own(self, group: Tied) -> nn.Parameter:
        held = dict(self.module.named_parameters(remove_duplicate=False))
        return next(held[name] for name in group.names if name in held)

    def _leaf(self, name: str, value: Tensor, train: bool) -> Tensor:
        expected = self.routes.values.get(name)
        value = value.detach()
        return value.requires_grad_() if train and expected is not None and expected.requires_grad else value

    def _check(self, name: str, value: Any, train: bool) -> None:
        """What leaves the stage must be what the others made room for."""
        expected = self.routes.values.get(name)
        if expected is None:
            return
        if (
            not isinstance(value, Tensor)
            or tuple(value.shape) != expected.shape
            or value.dtype != expected.dtype
            or (train and value.requires_grad != expected.requires_grad)
        ):
            raise SignatureMismatch(
                f"stage {self.index} makes {name}: {describe(value)}, but the pipeline was cut for {expected.describe()}: run it with the "
                "shapes and the frozen parameters that it was cut with, or cut it again"
            )


class _Share:
    """This stage's part of a tied parameter's gradient for one microbatch, kept apart from what lies in ``.grad`` already.

    The stage that comes first owns the sum: the shares arrive there along the chain, and only there are they added to ``.grad``.
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
        if self.owned:
            return None
        share, self.parameter.grad = self.parameter.grad, self._before
        return share if share is not None else torch.zeros_like(self.parameter)


def detached(tree: Any) -> Any:
    """The same nested value with every tensor cut off from its history."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _device_of(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return first.device if first is not None else torch.device("cpu")
