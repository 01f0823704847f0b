"""A pipe whose stages run the model's own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita._torch.graph_module.lazy_module import lazy_module
from partita.errors import ModuleNameError
from partita.pipelining.blocks.packet import first_packet
from partita.pipelining.blocks.stage import BlockStage, block_routes, warn_uncompiled
from partita.pipelining.blocks.stage_module import StageModule
from partita.pipelining.frontends.modules.borders import BlockPlan
from partita.pipelining.frontends.modules.build import moved, stage_modules_of
from partita.pipelining.frontends.pipe import Pipe, stage_name
from partita.pipelining.interface.loss import LossSpec
from partita.pipelining.interface.model_structure import structure_of
from partita.pipelining.stages.placing.own_memory import with_own_memory
from partita.pipelining.stages.placing.relocate import devices_of
from partita.pipelining.tied.tied_parameters import tied_parameters
from partita.planning import Plan
from partita.runtime import Comm
from partita.runtime.comms.group_or_comm import check_group_or_comm
from partita.runtime.host_generators import generator_states

__all__ = ["ModulePipe"]


@final
class ModulePipe(Pipe):
    """The `Pipe` that ``pipeline(..., frontend="modules")`` returns, for which nothing is captured.

    Each stage runs the model's own ``forward`` and computes only its own part of it.

    It takes any arguments that the model takes, of any batch size. In a pipeline random numbers follow (seed,
    step, microbatch, stage), those of Python and numpy (seed, step, microbatch); called locally, the pipe
    draws as the model does.

    Args:
        model: the model that is cut.
        block_plan: what each stage runs and holds.
        output: what the model returned for the example, on the meta device.
        plan: how the cuts were chosen, or None where they were made by hand.
        loss_spec: see `pipeline`.

    Raises:
        CaptureError: the model holds something that can't be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        block_plan: BlockPlan,
        output: Any,
        plan: Plan | None = None,
        loss_spec: LossSpec | None = None,
    ) -> None:
        modules = stage_modules_of(model, block_plan)
        names = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
        routes = block_routes(len(modules), tied_parameters(modules), names)
        stitched = _stitched(modules, training=model.training)
        routes = replace(routes, structure=structure_of(model))
        super().__init__(stitched, routes, None, devices_of(model), plan)
        self._find_loss(loss_spec, output, Tensor, _starts_gradients)
        self.training = model.training

    def _run_stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.compile_options is not None:
            for stage in range(self.num_stages):
                warn_uncompiled(stage)
        return self.split_gm(first_packet(args, kwargs, live=True, generators=generator_states()))

    def __getattr__(self, name: str) -> Any:
        if name == "whole":
            raise ModuleNameError(
                'the pipe was cut with frontend="modules" and runs the model\'s own code: it has no graph of '
                'the whole; use the model, or cut it with frontend="export"'
            )
        return super().__getattr__(name)

    def get_stage_module(self, stage_idx: int) -> StageModule:
        """See `Pipe.get_stage_module`."""
        return cast("StageModule", super().get_stage_module(stage_idx))

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Comm | None = None,
    ) -> BlockStage:
        """See `Pipe.build_stage`."""
        check_group_or_comm(group, comm)
        module = self.get_stage_module(stage_index)
        if device is not None:
            module = moved(module, torch.device(device))
        own = with_own_memory(module, comm)
        stage = BlockStage(own, stage_index, self.routes, module.home, comm=comm)
        stage.group = group
        stage.loss_fn = self.step_loss
        stage.example = self.example
        stage.other_weights = self._other_weights(stage_index)
        stage.original = self.original
        stage.recompute = stage_index in self.recompute
        if self.compile_options is not None:
            stage.compile_with(self.compile_options)
        return stage

    def _about_stages(self) -> Iterator[str]:
        for stage in range(self.num_stages):
            module = self.get_stage_module(stage)
            count = sum(parameter.numel() for parameter in module.parameters())
            blocks = module.block_cut.outermost(stage)
            yield f"stage {stage}: {', '.join(blocks) or 'no blocks'}, {count:,} parameters"


def _starts_gradients(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def _stitched(modules: Sequence[StageModule], *, training: bool) -> GraphModule:
    """A graph that calls the stages one after the other."""
    graph = Graph()
    packet = graph.placeholder("packet")
    for stage in range(len(modules)):
        packet = graph.call_module(stage_name(stage), (packet,))
    graph.output(packet)
    stitched = lazy_module(graph, "Stages", training=training)
    for stage, module in enumerate(modules):
        stitched.add_module(stage_name(stage), module)
    return stitched
