"""The inputs, the results and the state of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partita.pipelining.interface.routes import Routes
from partita.pipelining.interface.values import Value
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.running.loss_leaves import LossLeaves
from partita.pipelining.steps.running.separate_writes import SeparateWrites
from partita.planning import Action, ActionKind
from partita.runtime import RandomKey

__all__ = ["StepInputs", "StepResults", "StepState"]


@dataclass(frozen=True)
class StepInputs:
    """What one step is given, cut into microbatches.

    Attributes:
        arguments: for each microbatch the tensors among the model's inputs, by name; None on ranks without
            the first stage.
        targets: for each microbatch; None where there are none.
        weights: the weight of each microbatch's loss.
        seed: of the random numbers.
        number: the number of the step, on which random numbers depend.
        routes: for each microbatch, with its sizes; empty where no size is open.
        keep_outputs: whether the model's results are wanted.
        loss_kwargs: further arguments of the loss function.
        context: what custom functions are given; None where there are none.
        samples: how many each microbatch has; empty where this rank does not know.
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
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepResults:
    """What one step returns, in the order of the microbatches; empty on ranks without the last stage.

    Attributes:
        outputs: what the model returns, detached.
        losses: 0-d tensors; in evaluation only where there are targets.
    """

    outputs: list[Any]
    losses: list[Tensor]


class StepState:
    """What the instructions of one rank share while a step runs."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self.loss_leaves = LossLeaves(stages.values())
        self.inputs = StepInputs(None, None, (), 0, 0)
        self._writes = SeparateWrites()
        self.devices: dict[int, torch.device] = {}
        self._is_on_host = True
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        self._keys: dict[int, RandomKey] = {}
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def begin(self, inputs: StepInputs) -> None:
        """Start a step."""
        self._writes = SeparateWrites(inputs.arguments or ())
        self.inputs = replace(inputs, arguments=self._writes.arguments) if inputs.arguments else inputs
        self._keys = {}
        self._seeds = {}
        self.devices = {index: stage.device for index, stage in self._stages.items()}
        self._is_on_host = all(device.type == "cpu" for device in self.devices.values())

    def key(self, microbatch: int) -> RandomKey:
        """What the random numbers of a microbatch depend on."""
        key = self._keys.get(microbatch)
        if key is None:
            key = self._keys[microbatch] = RandomKey(self.inputs.seed, self.inputs.number, microbatch)
        return key

    def seed(self, microbatch: int, loss: Tensor) -> Tensor:
        """The gradient that a microbatch's loss starts its backward pass with: its weight."""
        key = (self.inputs.weights[microbatch], loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            seed = self._seeds[key] = torch.full_like(loss, key[0])
        return seed

    def placed(self, stage: int, tensors: list[Any], values: Sequence[Value]) -> list[Any]:
        """Return what a stage sends where its receivers expect it: on the device, but for what is on the host
        in the uncut model. Over NCCL the two ends would wait for each other elsewhere.
        """
        if self._is_on_host:
            return tensors
        device = self.devices[stage]
        return [
            tensor if tensor is None or not tensor.is_cpu or value.on_host else tensor.detach().to(device)
            for tensor, value in zip(tensors, values, strict=True)
        ]

    def empty_like_value(self, action: Action, microbatch: int, value: Value) -> Tensor:
        """Memory for a value, or its gradient, that a stage sends or receives."""
        stage = action.stage
        if self.inputs.routes:
            value = self.inputs.routes[microbatch].values[value.name]
        shape: Any = value.shape  # the sizes of a microbatch are numbers
        memory = self._stages[stage].input_memory
        if value.on_host:
            return torch.empty(shape, dtype=value.dtype, device="cpu")
        if memory is None or action.is_send:
            return torch.empty(shape, dtype=value.dtype, device=self.devices[stage])
        place = microbatch, (action.kind, value.name)
        begins = action.kind is ActionKind.RECV_F
        return memory.empty(*place, shape, value.dtype, self.devices[stage], begins=begins)

    def finish(self) -> StepResults:
        """End the step and return its results."""
        results = StepResults(
            [self.outputs[number] for number in sorted(self.outputs)],
            [self.losses[number] for number in sorted(self.losses)],
        )
        self.clear()
        return results

    def clear(self) -> None:
        """Drop inputs and results, at the end of a step or after a failure."""
        self._writes.count()
        self.inputs = StepInputs(None, None, (), 0, 0)
        self.outputs, self.losses = {}, {}
