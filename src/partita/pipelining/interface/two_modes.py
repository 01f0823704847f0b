"""One module with two graphs over one state, for models whose operations differ in training and evaluation.

Where the modes differ in constants only, one graph serves both (`partita.capture.merging.merge_modes`). Where
they differ in operations (an auxiliary head, stochastic depth, ``if self.training:``), this module runs the
graph of its mode::

    TwoModes.training ── True ──>  graph of training    ─┐
                      └─ False ─>  graph of evaluation  ─┴─> self.blocks.0.weight, ... (one state)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from partita._torch.export.signature import Signature
from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.lazy_module import LazyGraphModule, lazy_module, run_by, use_flat_signature
from partita.errors import ExecutionError
from partita.graph.attributes import Attribute
from partita.graph.effect_rules.conditions import OnlyIf, branch_effect
from partita.splitter import Split
from partita.splitter.building.install import attributes_of, install

__all__ = ["ModeCut", "TwoModes", "graphs_in", "joined", "writes_in_a_branch"]


@dataclass(frozen=True)
class ModeCut:
    """The cut of the graph of one mode."""

    whole: GraphModule
    split: Split
    signature: Signature


def joined(train: ModeCut, evaluation: ModeCut) -> tuple[GraphModule, Split]:
    """Return the whole model and its cut with both modes: every module has the graph of each."""
    signatures = {True: train.signature, False: evaluation.signature}
    whole = TwoModes(train.whole, evaluation.whole, signatures)
    pieces = [
        replace(piece, module=_as_graph(TwoModes(piece.module, other.module)))
        for piece, other in zip(train.split.pieces, evaluation.split.pieces, strict=True)
    ]
    stitched = TwoModes(train.split.module, evaluation.split.module, signatures)
    for piece in pieces:
        stitched.add_module(piece.name, piece.module)
    split = replace(train.split, module=_as_graph(stitched), pieces=tuple(pieces))
    return _as_graph(whole), split


def _as_graph(module: TwoModes) -> GraphModule:
    """Type a module as a graph module: it is called and read (``graph``, ``print_readable``) like one."""
    return cast("GraphModule", module)


class TwoModes(nn.Module):
    """Runs one graph in training and another in evaluation. Its parameters, buffers and submodules are those
    of both.

    Args:
        train: its state becomes that of this module.
        evaluation: the state that only its graph uses is added.
        signatures: by mode, how the graphs flatten their arguments; None: they take tensors as they are.
    """

    def __init__(
        self, train: GraphModule, evaluation: GraphModule, signatures: Mapping[bool, Signature] | None = None
    ) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[table].update(vars(train)[table])
        vars(self).update(
            {name: value for name, value in vars(train).items() if isinstance(value, torch.Tensor)}
        )
        attributes = attributes_of(train, train.graph.nodes)
        graph = copy_graph(evaluation.graph)
        install(self, attributes)
        install(self, _renamed_apart(attributes, attributes_of(evaluation, evaluation.graph.nodes), graph))
        self._signatures = None if signatures is None else dict(signatures)
        # no children: they hold no state, and are run with this module's
        object.__setattr__(
            self,
            "graphs",
            {True: _shell(copy_graph(train.graph), train), False: _shell(graph, evaluation)},
        )
        self.training = train.training

    graphs: dict[bool, LazyGraphModule]

    @property
    def graph(self) -> Graph:
        """The graph of the present mode."""
        return self.graphs[self.training].graph

    @property
    def current(self) -> GraphModule:
        """The graph of the present mode as a module without state, to read."""
        return self.graphs[self.training]

    @property
    def signature(self) -> Signature:
        """How the graph of the present mode flattens its arguments."""
        if self._signatures is None:
            raise ExecutionError("this module takes its tensors as they are: it has no signature")
        return self._signatures[self.training]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of the present mode.

        Raises:
            ExecutionError: a submodule is in the other mode.
        """
        for name, child in self.named_modules():
            if child.training is not self.training:
                raise ExecutionError(
                    f"{name!r} is in {_mode(child.training)} mode and the whole in {_mode(self.training)} "
                    "mode: this model takes another path in each, so its parts can't be switched alone; call "
                    "train() or eval() on the whole"
                )
        graph = self.graphs[self.training]
        if self._signatures is None:
            return run_by(graph, self, args, kwargs)
        return self.signature.unflatten(run_by(graph, self, self.signature.flatten(args, kwargs)))

    def print_readable(self) -> None:
        """Print the code of both graphs."""
        for graph in self.graphs.values():
            graph.print_readable()


def graphs_in(module: nn.Module) -> Iterator[GraphModule]:
    """Yield every graph in a module, and those of `TwoModes`, which are no children."""
    for child in module.modules():
        if isinstance(child, GraphModule):
            yield child
        elif isinstance(child, TwoModes):
            yield from child.graphs.values()


def writes_in_a_branch(module: nn.Module) -> bool:
    """Return whether a graph in a module writes to something in one branch on data only."""
    nodes = (node for graph in graphs_in(module) for node in graph.graph.nodes)
    return any(isinstance(node.target, OnlyIf) and branch_effect(node).writes for node in nodes)


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _shell(graph: Graph, source: GraphModule) -> LazyGraphModule:
    use_flat_signature(graph)
    shell = lazy_module(graph, type(source).__name__, training=source.training)
    shell.meta = dict(source.meta)
    return shell


def _renamed_apart(taken: list[Attribute], others: list[Attribute], graph: Graph) -> list[Attribute]:
    """The attributes ``others``, each under a free name where its name is taken by another constant or nested
    graph; ``graph`` then uses that name.
    """
    values = {item.target: item.value for item in taken}
    names: dict[str, str] = {}
    for item in others:
        same = (
            item.target not in values or values[item.target] is item.value or item.target.endswith("training")
        )
        if same or isinstance(item.value, nn.Parameter) or item.kind == "buffer":
            continue
        name = f"{item.target}_eval"
        while name in values:
            name += "_"
        names[item.target] = name
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and node.target in names:
            node.target = names[node.target]
    return [replace(item, target=names.get(item.target, item.target)) for item in others]
