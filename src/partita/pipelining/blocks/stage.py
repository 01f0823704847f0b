"""A stage that runs the model's own code, as a rank runs it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from partita.errors import NotCompiled
from partita.pipelining.blocks.packet import Gradients, first_packet
from partita.pipelining.blocks.stage_module import StageModule
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.interface.routes import Routes, StageBorder, Tied, make_routes
from partita.pipelining.interface.values import Value
from partita.pipelining.stages.flight import Flight, as_called
from partita.pipelining.stages.parts import check_no_conversions, check_no_sharded_parts
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm

__all__ = ["BlockStage", "block_routes", "warn_uncompiled"]

_ARGUMENTS = "arguments"
"""The name under which the first stage takes the model's arguments."""
_INPUT, _OUTPUT = "input ", "output "
"""Before the numbers of tensors in a stage's inputs and outputs."""


def warn_uncompiled(stage: int) -> None:
    """Warn that a stage of a pipe that was to be compiled runs as it is."""
    warnings.warn(
        f'stage {stage} runs uncompiled, with the same results: it was cut with frontend="modules" '
        'and runs the model\'s own code, of which there is no graph; cut with frontend="export", or '
        "make a module of each stage's layers for PipelineStage(module, ...), which can be compiled",
        NotCompiled,
        stacklevel=4,
    )


@final
class BlockStage(Stage):
    """A stage of a pipe that was cut with ``frontend="modules"``, from its ``build_stage``.

    Which tensors cross is found while it runs: a `Packet` goes forward and `Gradients` come back, each as one
    value. `forward` raises ExecutionError where the model uses a tensor that no stage has handed on.
    """

    def __init__(
        self, module: nn.Module, index: int, routes: Routes, device: torch.device, *, comm: Comm | None = None
    ) -> None:
        super().__init__(module, index, routes, device, comm=comm)
        self._output_bundle = bundle_name(index)
        self._input_bundle = bundle_name(index - 1)

    def compile_with(self, options: CompileOptions) -> None:  # noqa: ARG002 - those of any stage
        """Warn that it stays as it is."""
        warn_uncompiled(self.index)

    def begin(self, microbatches: int) -> None:
        """See `Stage.begin`."""
        check_no_sharded_parts(self._inner, self.index)
        super().begin(microbatches)

    def run_among(self, processes: tuple[int, ...]) -> None:
        """See `Stage.run_among`."""
        super().run_among(processes)
        if isinstance(self._inner, StageModule):
            self._inner.run_among(processes)

    def _run(self, values: Mapping[str, Any], *, train: bool) -> tuple[Flight, dict[str, Any]]:
        check_no_conversions(self.module, self.index)
        packet = values[_ARGUMENTS if self.is_first else self._input_bundle]
        leaves = {
            number: value.detach().requires_grad_(train and value.requires_grad)
            for number, value in packet.values.items()
        }
        called = as_called(leaves, packet.values, is_first=self.is_first)
        output = self._called(packet.with_values(called))
        inputs = {f"{_INPUT}{number}": leaf for number, leaf in leaves.items() if leaf.requires_grad}
        sources: dict[str, Tensor] = {}
        if self.is_first:
            arguments = {name: packet.values[int(name.removeprefix(_INPUT))] for name in inputs}
            # without those that forward has let require gradients: what the caller has does not
            sources = {name: value for name, value in arguments.items() if value.requires_grad}
        if self.is_last:
            self._result = output
            return Flight(inputs, {}, sources, False), {}
        outputs = {
            f"{_OUTPUT}{number}": value for number, value in output.values.items() if value.requires_grad
        }
        return Flight(inputs, outputs, sources, False), {self._output_bundle: output}

    def backward(
        self, microbatch: int, gradients: Mapping[str, Any], loss: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Any]:
        """Run the whole backward pass of one microbatch. Takes and returns `Gradients`, and gradients of tied
        parameters, by name.
        """
        return self._bundled(super().backward(microbatch, self._unbundled(gradients), loss))

    def backward_input(self, microbatch: int, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Run the first half of `backward`: the gradients of the inputs."""
        return self._bundled(super().backward_input(microbatch, self._unbundled(gradients)))

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the first stage takes for a microbatch."""
        return {_ARGUMENTS: first_packet(args, kwargs, live=False)}

    def _unbundled(self, gradients: Mapping[str, Any]) -> dict[str, Tensor]:
        tensors = {name: value for name, value in gradients.items() if name != self._output_bundle}
        if self._output_bundle in gradients:
            bundle: Gradients = gradients[self._output_bundle]
            tensors |= {f"{_OUTPUT}{number}": value for number, value in bundle.values.items()}
        return tensors

    def _bundled(self, results: Mapping[str, Any]) -> dict[str, Any]:
        bundled = {name: value for name, value in results.items() if not name.startswith(_INPUT)}
        if not self.is_first:
            values = {
                int(name.removeprefix(_INPUT)): value
                for name, value in results.items()
                if name.startswith(_INPUT) and value is not None
            }
            bundled[self._input_bundle] = Gradients(values)
        return bundled


def bundle_name(stage: int) -> str:
    """The name of what a stage hands to the next."""
    return f"output of stage {stage}"


def block_routes(stages: int, tied: tuple[Tied, ...], parameters: tuple[str, ...]) -> Routes:
    """Return the routes between such stages: one bundle a border, and the gradients of tied parameters.

    Args:
        tied: parameters that several stages hold.
        parameters: the names of all parameters, in the model's own order.
    """
    names = [bundle_name(stage) for stage in range(stages - 1)]
    borders = [
        StageBorder(tuple(names[stage - 1 : stage]) if stage else (), tuple(names[stage : stage + 1]))
        for stage in range(stages)
    ]
    producers = {name: stage for stage, name in enumerate(names)}
    bundles = {name: Value(name, (), torch.uint8, True, bundle=True) for name in names}
    return replace(make_routes(borders, producers, bundles, (), (), tied), parameters=parameters)
