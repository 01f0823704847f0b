"""A model cut into stages: runs locally like the model, and hands out stages for ranks to run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.export import Signature
from partita._torch.fake import fake_values
from partita.errors import CaptureError
from partita.pipelining.routes import Named, Routes, StageBorder, make_routes
from partita.pipelining.stage import PipelineStage
from partita.pipelining.tied import add_aliases, tied_parameters
from partita.planning import Plan
from partita.runtime import Comm
from partita.splitter import Split

__all__ = ["Pipe"]


class Pipe(nn.Module):
    """What `pipeline` returns.

    Calling it runs the stages one after the other in this process, with the model's own signature, output structure,
    autograd and random numbers. The parameters are the model's own.

    Attributes:
        split_gm: the stitched graph; its children ``submod_pp_<i>`` are the stages.
        routes: what crosses the borders.
        plan: how the cuts were chosen, or None where they were made by hand.
        whole: the captured graph before the cut: the reference for what the pipeline computes.
    """

    def __init__(self, whole: GraphModule, split: Split, signature: Signature, plan: Plan | None = None) -> None:
        super().__init__()
        self.split_gm = split.module
        self.plan = plan
        self.signature = signature
        self._split = split
        object.__setattr__(self, "whole", whole)  # the same parameters: not a second child
        modules = [piece.module for piece in split.pieces]
        aliases = _tied_names(whole)
        for module in modules:
            add_aliases(module, aliases)
        self.routes = _routes(whole, split, signature, modules)
        self.train(whole.training)

    whole: GraphModule

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self._split.pieces)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process; arguments and result are those of the model."""
        return self.split_gm(*args, **kwargs)

    def get_stage_module(self, index: int) -> GraphModule:
        """The module of one stage; its parameters have their original names.

        Raises:
            IndexError: there is no such stage.
        """
        if not 0 <= index < self.num_stages:
            raise IndexError(f"there is no stage {index}: this pipe has stages 0 to {self.num_stages - 1}")
        return self._split.pieces[index].module

    def build_stage(self, index: int, device: torch.device | str | None = None, *, comm: Comm | None = None) -> PipelineStage:
        """The stage as a rank runs it. Collective over the default process group where ``comm`` is not given.

        Args:
            index: which stage.
            device: where its parameters go; left where they are if not given.
            comm: what the ranks talk through; made from the default process group if not given.
        """
        module = self.get_stage_module(index)
        if device is not None:
            module.to(device)
        return PipelineStage._from_pipe(module, index, self.routes, self.signature, device=device, comm=comm)

    def info(self) -> str:
        """Stages, their parameters and what crosses between them, as text."""
        lines = []
        for stage, module in enumerate(self._split.pieces):
            count = sum(parameter.numel() for parameter in module.module.parameters())
            lines.append(f"stage {stage}: {len(module.node_names)} operations, {count:,} parameters")
            for (producer, consumer), names in self.routes.forward.items():
                if producer == stage:
                    lines += [f"  to stage {consumer}: {self.routes.values[name].describe()}" for name in names]
        lines += [f"tied: {' = '.join(tied.names)} in stages {list(tied.stages)}" for tied in self.routes.tied]
        return "\n".join(lines)

    def print_readable(self) -> None:
        """Print the code of the stitched graph and of every stage."""
        self.split_gm.print_readable()


def _tied_names(whole: GraphModule) -> list[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _routes(whole: GraphModule, split: Split, signature: Signature, modules: list[GraphModule]) -> Routes:
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    values = fake_values(whole, [node.meta["val"] for node in inputs])
    producers = {node.name: 0 for node in inputs}
    for stage, piece in enumerate(split.pieces):
        producers.update(dict.fromkeys(piece.outputs, stage))
    borders = [StageBorder(piece.inputs, piece.outputs) for piece in split.pieces]
    output = next(iter(reversed(whole.graph.nodes)))
    results = [Named(item.name) if isinstance(item, Node) else item for item in output.args[0]]
    for item in output.all_input_nodes:
        if item.op == "get_attr":
            raise CaptureError(
                f"the model returns {item.target!r}, a parameter or buffer of its own, which stages can't hand out: return a copy "
                "(.clone()), or read it from the stage's module"
            )
    for piece in split.pieces:
        for name in piece.inputs:
            if not isinstance(values[name], torch.Tensor):
                raise CaptureError(
                    f"{name!r}, which {piece.name} takes, is a {type(values[name]).__name__} and not a tensor: cut where only "
                    "tensors cross (Pipe cuts by plan do)"
                )
    return make_routes(borders, producers, values, [node.name for node in inputs], results, tied_parameters(modules))

