"""What one step is given, what it returns, and what it has under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from partita.pipelining.interface.routes import Routes, Value
from partita.pipelining.stages.stage import Stage
from partita.runtime import RandomKey

__all__ = ["StepInputs", "StepResults", "StepState"]


@dataclass(frozen=True)
class StepInputs:
    """What one step is given, cut into microbatches.

    Attributes:
        arguments: for each microbatch the tensors among the model's inputs, by name; None on ranks without
            the first stage.
        targets: for each microbatch; None where there are none.
        weights: what each microbatch's loss counts for.
        seed: of the random numbers.
        number: which step it is; random numbers differ from step to step.
        routes: for each microbatch, with its sizes; empty where no size is open.
        keep_outputs: whether the model's results are wanted.
        loss_kwargs: what the loss function is called with besides.
        context: what custom functions are given; None where there are none.
    """

    arguments: Sequence[Mapping[str, Tensor]] | None
    targets: Sequence[Any] | None
    weights: tuple[float, ...]
    seed: int
    number: int
    routes: tuple[Routes, ...] = ()
    keep_outputs: bool = True
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)
    context: Any = None


@dataclass(frozen=True)
class StepResults:
    """What one step returns, in order of the microbatches; empty on ranks without the last stage.

    Attributes:
        outputs: what the model returns, without history.
        losses: 0-d tensors; in evaluation only where there is something to compare with.
    """

    outputs: list[Any]
    losses: list[Tensor]


class StepState:
    """What the instructions of one rank's program share while a step runs. Emptied after each."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self.inputs = StepInputs(None, None, (), 0, 0)
        self.devices: dict[int, torch.device] = {}
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        self._keys: dict[int, RandomKey] = {}
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def begin(self, inputs: StepInputs) -> None:
        """A step starts."""
        self.inputs = inputs
        self._keys = {}
        self._seeds = {}
        self.devices = {index: stage.device for index, stage in self._stages.items()}

    def key(self, microbatch: int) -> RandomKey:
        """What the random numbers of a microbatch depend on."""
        key = self._keys.get(microbatch)
        if key is None:
            key = self._keys[microbatch] = RandomKey(self.inputs.seed, self.inputs.number, microbatch)
        return key

    def seed(self, microbatch: int, loss: Tensor) -> Tensor:
        """What the backward pass of a microbatch's loss starts with: its weight."""
        key = (self.inputs.weights[microbatch], loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            seed = self._seeds[key] = torch.full_like(loss, key[0])
        return seed

    def empty_like_value(self, stage: int, microbatch: int, value: Value) -> Tensor:
        """For the data of a value, or of its gradient, that this stage sends or receives."""
        if self.inputs.routes:
            value = self.inputs.routes[microbatch].values[value.name]
        shape = cast("tuple[int, ...]", value.shape)  # the sizes of a microbatch are numbers
        return torch.empty(shape, dtype=value.dtype, device=self.devices[stage])

    def finish(self) -> StepResults:
        """Hand out the results."""
        results = StepResults(
            [self.outputs[number] for number in sorted(self.outputs)],
            [self.losses[number] for number in sorted(self.losses)],
        )
        self.clear()
        return results

    def clear(self) -> None:
        """The step is over, or has failed."""
        self.inputs = StepInputs(None, None, (), 0, 0)
        self.outputs, self.losses = {}, {}
