"""The pipe whose stages are pieces of a captured graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule, Node

from partita._torch.export.signature import Signature
from partita._torch.fake.shapes import fake_values
from partita._torch.modules.registered_state import order_as_in
from partita.capture.open_sizes.sizes import Sizes, without_sizes
from partita.capture.proving.proof import UNASKED, Proof
from partita.errors import CaptureError
from partita.graph.effects import metadata
from partita.pipelining.frontends.graph.branches import trained_in_a_branch
from partita.pipelining.frontends.graph.coverage import check_operations, unused_state
from partita.pipelining.frontends.graph.dtypes import check_dtypes, parameter_dtypes
from partita.pipelining.frontends.graph.recompute_regions import Region, with_regions
from partita.pipelining.frontends.graph.state_names import add_aliases, add_unused
from partita.pipelining.frontends.graph.writes import reused_outputs, written_inputs
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.interface.loss import LossSpec
from partita.pipelining.interface.model_structure import structure_of
from partita.pipelining.interface.routes import Named, Routes, StageBorder, make_routes
from partita.pipelining.interface.two_modes import ModeCut, graphs_in, joined
from partita.pipelining.interface.values import accept, with_host_values
from partita.pipelining.stages.build import build_stage
from partita.pipelining.stages.compile_module import compile_module
from partita.pipelining.stages.graph_stage import GraphStage
from partita.pipelining.stages.placing.relocate import devices_of
from partita.pipelining.tied.tied_parameters import tied_parameters
from partita.pipelining.training.reference import graph_inputs
from partita.planning import Plan
from partita.runtime import Comm
from partita.splitter import Piece, Split

__all__ = ["GraphPipe"]


@final
class GraphPipe(Pipe):
    """A `Pipe` whose stages are pieces of the model's captured graph.

    Attributes:
        unused: names of the parameters and buffers that no operation uses; stages hold them nevertheless.
        whole: the captured graph before the cut: the reference for what the pipeline computes. It has the
            same parameters and follows ``train()`` and ``eval()`` of the pipe.
    """

    signature: Signature

    def __init__(
        self,
        whole: GraphModule,
        split: Split,
        signature: Signature,
        plan: Plan | None = None,
        loss_spec: LossSpec | None = None,
        evaluation: ModeCut | None = None,
        *,
        proof: Proof = UNASKED,
        regions: Sequence[Region] = (),
    ) -> None:
        drafts = split.pieces, () if evaluation is None else evaluation.split.pieces
        wholes = whole, None if evaluation is None else evaluation.whole
        split, filled = with_regions(split, regions) if regions else (split, frozenset())
        if evaluation is not None:
            whole, split = joined(ModeCut(whole, split, signature), evaluation)
        modules = [piece.module for piece in split.pieces]
        for graph, pieces in zip(wholes, drafts, strict=True):
            if graph is not None:
                check_operations(graph, pieces)
        unused = tuple(unused_state(graphs_in(whole), whole))
        add_unused(whole, modules)
        add_aliases(whole, modules)
        for module in modules:
            order_as_in(whole, module)
        routes, values = _routes(wholes[0], drafts[0], modules)
        if evaluation is not None and wholes[1] is not None:
            other = replace(_routes(wholes[1], drafts[1], modules)[0], signature=evaluation.signature)
            routes = replace(routes, evaluation=other, signature=signature)
        homes = devices_of(whole, (metadata(node) for node in whole.graph.find_nodes(op="placeholder")))
        super().__init__(split.module, routes, signature, homes, plan, proof)
        self.recompute = filled
        self.unused = unused
        self._pieces = split.pieces
        object.__setattr__(self, "whole", whole)  # the same parameters: not a second child
        self._dtypes = parameter_dtypes(whole)
        output = signature.unflatten(without_sizes(routes.results))
        self._find_loss(loss_spec, output, Named, partial(_starts_gradients, values))
        self.training = whole.training

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What the graph was cut into, one piece a stage."""
        return self._pieces

    @property
    def draws_other_numbers(self) -> bool:
        """Whether its stages, as they are compiled, draw other random numbers than the model."""
        return self.compile_options is not None and self.compile_options.draws_other_numbers

    def train(self, mode: bool = True) -> GraphPipe:
        """Set the mode of the pipe and of `whole`."""
        self.whole.train(mode)
        return super().train(mode)

    def compile_with(self, options: CompileOptions) -> None:
        """Compile the stages, those that are built from now on and those that run when the pipe is called."""
        self.compile_options = options
        for index, piece in enumerate(self._pieces):
            compile_module(piece.module, index, self.routes, options)

    def _run_stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_dtypes(self.whole, self._dtypes)
        args, kwargs = self.signature.bind(args, kwargs)
        flat, routes = self.signature.flatten(args, kwargs), self.routes.in_mode(self.training)
        accept(routes.inputs, flat, "the call", self.signature)
        routes.at(routes.sizes_of(flat), self.training)
        return self.split_gm(*args, **kwargs)

    def get_stage_module(self, stage_idx: int) -> GraphModule:
        """See `Pipe.get_stage_module`."""
        super().get_stage_module(stage_idx)
        return self._pieces[stage_idx].module

    def build_stage(
        self,
        stage_index: int,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        comm: Comm | None = None,
    ) -> GraphStage:
        """See `Pipe.build_stage`."""
        module = self.get_stage_module(stage_index)
        stage = build_stage(module, stage_index, self.info(), device, group, comm=comm)
        stage.other_weights = self._other_weights(stage_index)
        stage.original = self.original
        return stage

    def _about_stages(self) -> Iterator[str]:
        yield from _about_sizes(self.routes.sizes)
        returned = self.routes.only_returned
        for stage, piece in enumerate(self._pieces):
            count = sum(parameter.numel() for parameter in piece.module.parameters())
            yield f"stage {stage}: {len(piece.node_names)} operations, {count:,} parameters"
            for (producer, consumer), names in self.routes.forward.items():
                if producer == stage:
                    for name in names:
                        why = ", only to be returned" if name in returned else ""
                        yield f"  to stage {consumer}: {self.routes.values[name].describe()}{why}"

    def _remarks(self) -> Iterator[str]:
        if self.routes.evaluation is not None:
            yield "in evaluation the model takes another path:"
            for (producer, consumer), names in self.routes.evaluation.forward.items():
                for name in names:
                    value = self.routes.evaluation.values[name]
                    yield f"  stage {producer} to stage {consumer}: {value.describe()}"
        yield from (f"unused: {name}, held by stage {self._holder(name)}" for name in self.unused)

    def _holder(self, name: str) -> int:
        """The stage that holds the parameter or buffer of that name."""
        path, _, leaf = name.rpartition(".")
        for stage, piece in enumerate(self._pieces):
            try:
                getattr(piece.module.get_submodule(path), leaf)
            except AttributeError:
                continue
            return stage
        raise AssertionError(f"no stage holds {name!r}")


def _about_sizes(sizes: Sizes) -> list[str]:
    """Which sizes are open, under which conditions; or why none is."""
    if not sizes.symbols:
        because = f", because of: {sizes.fixed}" if sizes.fixed else ""
        return [f"sizes are those of the example{because}"]
    symbols = ", ".join(f"{symbol.name} (of {symbol.input}, dim {symbol.dim})" for symbol in sizes.symbols)
    conditions = [
        f"  where {condition.text}, because of: {condition.where}" for condition in sizes.conditions
    ]
    return [f"open: {symbols}", *conditions]


def _starts_gradients(values: Mapping[str, Any], leaf: Any) -> bool:
    value = values.get(leaf.name) if isinstance(leaf, Named) else None
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad


def _routes(
    whole: GraphModule, pieces: tuple[Piece, ...], modules: Sequence[nn.Module]
) -> tuple[Routes, Mapping[str, Any]]:
    """The routes, and an example of each value without data."""
    inputs = [node for node in whole.graph.nodes if node.op == "placeholder"]
    sizes = Sizes.of(whole)
    values = fake_values(whole, [metadata(node) for node in inputs], taken_after=_sent_after(whole, pieces))
    values |= trained_in_a_branch(whole, values)
    producers = {node.name: 0 for node in inputs}
    for stage, piece in enumerate(pieces):
        producers.update(dict.fromkeys(piece.outputs, stage))
        _check_tensors(piece, values, sizes, entry=stage == 0)
    routes = make_routes(
        [_border(piece) for piece in pieces],
        producers,
        values,
        graph_inputs(whole),
        _results(whole, sizes),
        tied_parameters(modules),
        sizes,
    )
    parameters = tuple(name for name, _ in whole.named_parameters(remove_duplicate=False))
    crossing = with_host_values(routes.values, values, devices_of(whole))
    return replace(routes, values=crossing, parameters=parameters, structure=structure_of(whole)), values


def _sent_after(whole: GraphModule, pieces: tuple[Piece, ...]) -> dict[str, tuple[str, ...]]:
    """The outputs of each piece, by the last of its nodes."""
    position = {node.name: number for number, node in enumerate(whole.graph.nodes)}
    return {
        max(piece.node_names, key=position.__getitem__): piece.outputs for piece in pieces if piece.node_names
    }


def _border(piece: Piece) -> StageBorder:
    reused = frozenset(piece.outputs[number] for number in reused_outputs(piece.module))
    return StageBorder(piece.inputs, piece.outputs, written_inputs(piece.module), reused)


def _check_tensors(piece: Piece, values: dict[str, Any], sizes: Sizes, *, entry: bool) -> None:
    """Raise CaptureError where the piece takes what no stage can send; the ``entry`` may take it."""
    for name in piece.inputs:
        value = values[name]
        if not isinstance(value, torch.Tensor) and name not in sizes.numbers:
            raise CaptureError(
                f"{name!r}, which {piece.name} takes, is a {type(value).__name__} and not a tensor: "
                "cut where only tensors cross (cuts by plan do)"
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided and not entry:
            raise CaptureError(
                f"{name!r}, which {piece.name} takes from another stage, is a sparse tensor "
                f"{tuple(value.shape)}, and stages send dense ones: make it a buffer, which each stage has, "
                "or dense (to_dense()), or cut so that one stage has all of its uses"
            )


def _results(whole: GraphModule, sizes: Sizes) -> list[Any]:
    """The model's results, flat: names, numbers that follow from sizes, and constants."""
    output = next(iter(reversed(whole.graph.nodes)))
    for item in output.all_input_nodes:
        if item.op == "get_attr":
            raise CaptureError(
                f"the model returns {item.target!r}, a parameter or buffer of its own, which stages can't "
                "hand out: return a copy (.clone()), or read it from the stage's module"
            )
    return [
        sizes.numbers.get(item.name, Named(item.name)) if isinstance(item, Node) else item
        for item in output.args[0]
    ]
