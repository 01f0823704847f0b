"""A pipe whose stages run the model's own code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.nodes import lazy_module
from partita.capture.proof import UNASKED
from partita.pipelining.blocks.packet import given
from partita.pipelining.blocks.stage import BlockStage, block_routes
from partita.pipelining.blocks.stage_module import StageModule, generator_states
from partita.pipelining.frontends.graph.pipe import Pipe
from partita.pipelining.frontends.modules.borders import BlockPlan
from partita.pipelining.frontends.modules.build import moved, stage_modules_of
from partita.pipelining.interface.loss import LossSpec, OutputLoss, checked_loss, loss_by_name
from partita.pipelining.interface.model_structure import structure_of
from partita.pipelining.interface.pipe_info import PipeInfo
from partita.pipelining.stages.flight import detached
from partita.pipelining.stages.own_memory import with_own_memory
from partita.pipelining.stages.relocate import devices_of
from partita.pipelining.tied.tied import tied_parameters
from partita.planning import Plan
from partita.runtime import Comm

__all__ = ["BlockPipe"]


class BlockPipe(Pipe):
    """What ``pipeline(..., frontend="modules")`` returns: like a `Pipe`, but nothing is captured. Each stage
    runs the model's own ``forward``, and computes its own part of it only.

    Any arguments that the model takes will do, of any batch size. In a pipeline random numbers follow (seed,
    step, microbatch, stage), those of Python and numpy (seed, step, microbatch); called locally, the pipe
    draws as the model does.

    Args:
        model: what is cut.
        block_plan: where.
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
        nn.Module.__init__(self)
        modules = stage_modules_of(model, block_plan)
        self.split_gm = _stitched(modules, training=model.training)
        self.plan = plan
        self.loss_spec = loss_spec
        self.training = model.training
        routes = block_routes(
            len(modules),
            tied_parameters(modules),
            tuple(name for name, _ in model.named_parameters(remove_duplicate=False)),
        )
        self.routes = replace(routes, structure=structure_of(model))
        self._homes = devices_of(model)
        self.proof = UNASKED
        self.loss = None if loss_spec is None else OutputLoss(loss_spec, output, Tensor)
        self.step_loss = self.loss or loss_by_name(output, _starts_gradients)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.routes.stages

    @property
    def replicated_params(self) -> list[dict[str, str]]:
        """For each parameter that several stages hold: its name in each of them, by the stage's name
        (``submod_pp_<i>``).
        """
        return [{f"submod_pp_{stage}": tied.names[0] for stage in tied.stages} for tied in self.routes.tied]

    def train(self, mode: bool = True) -> BlockPipe:
        """As on any module."""
        nn.Module.train(self, mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process; arguments and result are those of the model.

        Raises:
            ExecutionError: the marked loss is not one number, or depends on nothing that is trained; or the
                model needs what the example did not need, see `pipeline`.
        """
        output = self.split_gm(given(args, kwargs, live=True, generators=generator_states()))
        if self.loss is None or not torch.is_grad_enabled():
            return output
        checked_loss(self.loss(output)).backward()
        return detached(output)

    def get_stage_module(self, index: int) -> StageModule:  # type: ignore[override]
        """The module of one stage; its parameters have their original names.

        Raises:
            StageIndexError: there is no such stage.
        """
        self._check_stage(index)
        module = self.split_gm.get_submodule(f"submod_pp_{index}")
        assert isinstance(module, StageModule)
        return module

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Comm | None = None,
    ) -> BlockStage:
        """The stage as a rank runs it; arguments are those of `Pipe.build_stage`."""
        module = self.get_stage_module(stage_index)
        if device is not None:
            module = moved(module, torch.device(device))
        own = with_own_memory(module, comm)
        stage = BlockStage(own, stage_index, self.routes, module.home, comm=comm)
        stage.group = group
        stage.loss_fn = self.step_loss
        return stage

    def info(self) -> PipeInfo:
        """What there is to know of the pipe without keeping it alive."""
        return PipeInfo(
            graph=copy_graph(self.split_gm.graph),
            num_stages=self.num_stages,
            has_loss_and_backward=self.has_loss_and_backward,
            routes=self.routes,
            signature=None,
            loss=self.step_loss,
            homes=self._homes,
            text=str(self),
            proof=self.proof,
        )

    def __str__(self) -> str:
        lines = [str(self.proof)]
        for stage in range(self.num_stages):
            module = self.get_stage_module(stage)
            count = sum(parameter.numel() for parameter in module.parameters())
            blocks = module.cut.outermost(stage)
            lines.append(f"stage {stage}: {', '.join(blocks) or 'no blocks'}, {count:,} parameters")
        lines += [
            f"tied: {' = '.join(tied.names)} in stages {list(tied.stages)}" for tied in self.routes.tied
        ]
        return "\n".join(lines)


def _starts_gradients(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


def _stitched(modules: Sequence[StageModule], *, training: bool) -> GraphModule:
    """Calls the stages one after the other."""
    graph = Graph()
    packet = graph.placeholder("packet")
    for stage in range(len(modules)):
        packet = graph.call_module(f"submod_pp_{stage}", (packet,))
    graph.output(packet)
    stitched = lazy_module(graph, "Stages", training=training)
    for stage, module in enumerate(modules):
        stitched.add_module(f"submod_pp_{stage}", module)
    return stitched
