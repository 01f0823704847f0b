"""A stage that runs the model's own code, as a rank runs it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, pairwise
from typing import Any, final

import torch
from torch import Tensor, nn

from partita.pipelining.blocks.packet import Gradients, given
from partita.pipelining.interface.routes import TRAILER, Routes, StageBorder, Tied, Value
from partita.pipelining.stages.flight import Flight
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm

__all__ = ["BlockStage", "block_routes"]

_ARGUMENTS = "arguments"
"""Under this name the first stage is given the model's arguments."""


@final
class BlockStage(Stage):
    """Made by the ``build_stage`` of a pipe that was cut with ``frontend="modules"``.

    What crosses is found while it runs: a `Packet` forward and `Gradients` backward, each as one value.
    `forward` raises ExecutionError where the model uses what no stage has handed on; see `Run`.
    """

    def __init__(
        self, module: nn.Module, index: int, routes: Routes, device: torch.device, *, comm: Comm | None = None
    ) -> None:
        super().__init__(module, index, routes, comm=comm)
        self._device = device
        self._to = bundle_name(index)
        self._from = bundle_name(index - 1)

    @property
    def device(self) -> torch.device:
        """Where its parameters or buffers are; what was given where it has neither."""
        tensors = chain(self._held.parameters(), self._held.buffers())
        return next((tensor.device for tensor in tensors), self._device)

    def _run(self, values: Mapping[str, Any], *, train: bool) -> tuple[Flight, dict[str, Any]]:
        packet = values[_ARGUMENTS if self.is_first else self._from]
        leaves = {
            number: value.detach().requires_grad_(train and value.requires_grad)
            for number, value in packet.values.items()
        }
        made = self._called(packet.with_values(leaves))
        wanted = {_taken(number): leaf for number, leaf in leaves.items() if leaf.requires_grad}
        sources: dict[str, Tensor] = {}
        if self.is_first:
            sources = {name: packet.values[number] for number, name in _numbers(wanted)}
        if self.is_last:
            self._result = made
            return Flight(wanted, {}, sources, False), {}
        outputs = {_made(number): value for number, value in made.values.items() if value.requires_grad}
        return Flight(wanted, outputs, sources, False), {self._to: made}

    def backward(
        self, microbatch: int, gradients: Mapping[str, Any], loss: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Any]:
        """Gradients of one microbatch: the whole backward pass. Takes and returns `Gradients`, and gradients
        of tied parameters, by name.
        """
        return self._bundled(super().backward(microbatch, self._opened(gradients), loss))

    def backward_input(self, microbatch: int, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """The first half of `backward`."""
        if self._at_once:
            return super().backward_input(microbatch, gradients)  # calls `backward`
        return self._bundled(super().backward_input(microbatch, self._opened(gradients)))

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the first stage is given for a microbatch."""
        return {_ARGUMENTS: given(args, kwargs, live=False)}

    def _opened(self, gradients: Mapping[str, Any]) -> dict[str, Tensor]:
        opened = {name: value for name, value in gradients.items() if name != self._to}
        if self._to in gradients:
            bundle: Gradients = gradients[self._to]
            opened |= {_made(number): value for number, value in bundle.values.items()}
        return opened

    def _bundled(self, results: Mapping[str, Any]) -> dict[str, Any]:
        bundled = {name: value for name, value in results.items() if not name.startswith(_TAKEN)}
        if not self.is_first:
            values = {
                int(name.removeprefix(_TAKEN)): value
                for name, value in results.items()
                if name.startswith(_TAKEN) and value is not None
            }
            bundled[self._from] = Gradients(values)
        return bundled


_TAKEN, _MADE = "taken ", "made "


def _taken(number: int) -> str:
    return f"{_TAKEN}{number}"


def _made(number: int) -> str:
    return f"{_MADE}{number}"


def _numbers(named: Mapping[str, Tensor]) -> list[tuple[int, str]]:
    return [(int(name.removeprefix(_TAKEN)), name) for name in named]


def bundle_name(stage: int) -> str:
    """Of what a stage hands to the next."""
    return f"output of stage {stage}"


def block_routes(stages: int, tied: tuple[Tied, ...], parameters: tuple[str, ...]) -> Routes:
    """What crosses between such stages: one bundle a border, and the gradients of tied parameters.

    Args:
        tied: parameters that several stages hold.
        parameters: the names of all of them, in the model's own order.
    """
    names = [bundle_name(stage) for stage in range(stages - 1)]
    values = {name: Value(name, (), torch.uint8, True, bundle=True) for name in names}
    forward = {(stage, stage + 1): (name,) for stage, name in enumerate(names)}
    backward: dict[tuple[int, int], tuple[str, ...]] = {
        (stage + 1, stage): (name,) for stage, name in enumerate(names)
    }
    for group in tied:
        values[group.value.name] = group.value
        if group.value.requires_grad:
            for earlier, later in pairwise(group.stages):
                backward[later, earlier] = (*backward.get((later, earlier), ()), group.value.name)
    links = sorted(
        (name, *pair)
        for way in (forward, backward)
        for pair, sent in way.items()
        for name in (*sent, TRAILER)
    )
    return Routes(
        borders=tuple(
            StageBorder(tuple(names[stage - 1 : stage]) if stage else (), tuple(names[stage : stage + 1]))
            for stage in range(stages)
        ),
        values=values,
        forward=forward,
        backward=backward,
        inputs=(),
        results=(),
        tied=tied,
        tags={link: number for number, link in enumerate(links)},
        parameters=parameters,
    )
