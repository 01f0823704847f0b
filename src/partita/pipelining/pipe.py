"""A model cut into stages: runs locally like the model, and hands out stages for ranks to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.export import Signature
from partita._torch.fake import fake_values, reaches_all
from partita.errors import CaptureError
from partita.graph.effects import metadata
from partita.pipelining.reference import graph_inputs
from partita.pipelining.routes import Named, Routes, StageBorder, accept, make_routes
from partita.pipelining.stage import PipelineStage
from partita.pipelining.state import add_aliases, add_unused
from partita.pipelining.tied import tied_parameters
from partita.pipelining.writes import reused_outputs, written_inputs
from partita.planning import Plan
from partita.runtime import Comm
from partita.splitter import Piece, Split

__all__ = ["Pipe"]


class Pipe(nn.Module):
    """What `pipeline` returns.

    Calling it runs the stages one after the other in this process, with the model's own signature, output
    structure, autograd and random numbers. The parameters are the model's own.

    Attributes:
        split_gm: the stitched graph; its children ``submod_pp_<i>`` are the stages.
        routes: what crosses the borders.
        signature: how arguments and results are flattened.
        plan: how the cuts were chosen, or None where they were made by hand.
        whole: the captured graph before the cut: the reference for what the pipeline computes. It shares the
            parameters; ``train()`` and ``eval()`` are its own.
    """

    whole: GraphModule

    def __init__(
        self, whole: GraphModule, split: Split, signature: Signature, plan: Plan | None = None
    ) -> None:
        super().__init__()
        self.split_gm = split.module
        self.plan = plan
        self.signature = signature
        self._pieces = split.pieces
        object.__setattr__(self, "whole", whole)  # the same parameters: not a second child
        modules = [piece.module for piece in split.pieces]
        add_unused(whole, modules)
        add_aliases(whole, modules)
        self.routes = _routes(whole, split.pieces)
        self.training = whole.training

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self._pieces)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in this process; arguments and result are those of the model.

        Raises:
            ValueError: arguments that the model was captured without, or with other names.
            SignatureMismatch: another shape, dtype or constant than the model was captured with.
        """
        args, kwargs = self.signature.bind(args, kwargs)
        accept(self.routes.inputs, self.signature.flatten(args, kwargs), "the call")
        return self.split_gm(*args, **kwargs)

    def get_stage_module(self, index: int) -> GraphModule:
        """The module of one stage; its parameters have their original names.

        Raises:
            IndexError: there is no such stage.
        """
        if not 0 <= index < self.num_stages:
            raise IndexError(f"there is no stage {index}: this pipe has stages 0 to {self.num_stages - 1}")
        return self._pieces[index].module

    def build_stage(
        self, index: int, device: torch.device | str | None = None, *, comm: Comm | None = None
    ) -> PipelineStage:
        """The stage as a rank runs it. It keeps only its own parameters alive.

        Args:
            index: which stage.
            device: where its parameters go; left where they are if not given.
            comm: what the ranks talk through; the schedule makes one from the default process group if it is
                not given.
        """
        module = self.get_stage_module(index)
        if device is not None:
            module.to(device)
        return PipelineStage(module, index, self.routes, self.signature, comm=comm)

    def info(self) -> str:
        """Stages, their parameters and what crosses between them, as text."""
        lines = []
        for stage, piece in enumerate(self._pieces):
            count = sum(parameter.numel() for parameter in piece.module.parameters())
            lines.append(f"stage {stage}: {len(piece.node_names)} operations, {count:,} parameters")
            for (producer, consumer), names in self.routes.forward.items():
                if producer == stage:
                    lines += [
                        f"  to stage {consumer}: {self.routes.values[name].describe()}" for name in names
                    ]
        lines += [
            f"tied: {' = '.join(tied.names)} in stages {list(tied.stages)}" for tied in self.routes.tied
        ]
        return "\n".join(lines)

    def print_readable(self) -> None:
        """Print the code of the stitched graph and of every stage."""
        self.split_gm.print_readable()


def _routes(whole: GraphModule, pieces: tuple[Piece, ...]) -> Routes:
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    values = fake_values(whole, [metadata(node) for node in inputs])
    producers = {node.name: 0 for node in inputs}
    for stage, piece in enumerate(pieces):
        producers.update(dict.fromkeys(piece.outputs, stage))
        _check_tensors(piece, values)
    routes = make_routes(
        [_border(piece) for piece in pieces],
        producers,
        values,
        graph_inputs(whole),
        _results(whole),
        tied_parameters([piece.module for piece in pieces]),
    )
    return replace(routes, masked=not _gradients_are_sure(whole, routes, values))


def _gradients_are_sure(whole: GraphModule, routes: Routes, values: dict[str, Any]) -> bool:
    """Whether every value that crosses gets a gradient, whatever the loss: only where it has a single result
    to start from.
    """
    results = [values[name] for name in routes.result_names]
    starts = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
    if len(starts) != 1:
        return False
    names = {name for names in routes.backward.values() for name in names}
    tied = {name for group in routes.tied for name in group.names}
    crossing = [values[name] for name in names if name in values]
    crossing += [values[node.name] for node in whole.graph.find_nodes(op="get_attr") if node.target in tied]
    return reaches_all(starts[0], [value for value in crossing if value.requires_grad])


def _border(piece: Piece) -> StageBorder:
    reused = frozenset(piece.outputs[number] for number in reused_outputs(piece.module))
    return StageBorder(piece.inputs, piece.outputs, written_inputs(piece.module), reused)


def _check_tensors(piece: Piece, values: dict[str, Any]) -> None:
    for name in piece.inputs:
        if not isinstance(values[name], torch.Tensor):
            raise CaptureError(
                f"{name!r}, which {piece.name} takes, is a {type(values[name]).__name__} and not a tensor: "
                "cut where only tensors cross (cuts by plan do)"
            )


def _results(whole: GraphModule) -> list[Any]:
    """What the model returns, flat."""
    output = next(iter(reversed(whole.graph.nodes)))
    for item in output.all_input_nodes:
        if item.op == "get_attr":
            raise CaptureError(
                f"the model returns {item.target!r}, a parameter or buffer of its own, which stages can't "
                "hand out: return a copy (.clone()), or read it from the stage's module"
            )
    return [Named(item.name) if isinstance(item, Node) else item for item in output.args[0]]
