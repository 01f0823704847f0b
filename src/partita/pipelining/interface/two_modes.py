"""One module with two graphs over one state: for models that do something else in training than in
evaluation.

Where the two differ in constants only, one graph serves both (see ``partita.capture.merge``). Where they
differ in operations (an auxiliary head, stochastic depth, ``if self.training:``), this module runs the one of
its mode::

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

from partita._torch.export.export import Signature
from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.lazy_module import LazyGraphModule, plain_arguments, run_by
from partita._torch.graph_module.nodes import lazy_module
from partita.errors import ExecutionError
from partita.graph.state import Attribute
from partita.splitter import Split
from partita.splitter.install import attributes_of, install

__all__ = ["ModeCut", "TwoModes", "graphs_in", "joined"]


@dataclass(frozen=True)
class ModeCut:
    """What one mode of a model was cut into."""

    whole: GraphModule
    split: Split
    signature: Signature


def joined(train: ModeCut, evaluation: ModeCut) -> tuple[GraphModule, Split]:
    """The whole and the cut of a model that takes another path in evaluation: every module has both
    graphs.
    """
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
    """It is called and read (``graph``, ``print_readable``) like one."""
    return cast("GraphModule", module)


class TwoModes(nn.Module):
    """Runs one graph in training and another in evaluation. Its parameters, buffers and submodules are those
    of both.

    Args:
        train: its state becomes that of this module.
        evaluation: what its graph uses that ``train`` has not is added.
        signatures: by mode, where the graphs flatten what they are called with; None: they take tensors as
            they are.
    """

    def __init__(
        self, train: GraphModule, evaluation: GraphModule, signatures: Mapping[bool, Signature] | None = None
    ) -> None:
        super().__init__()
        for holder in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[holder].update(vars(train)[holder])
        vars(self).update(
            {name: value for name, value in vars(train).items() if isinstance(value, torch.Tensor)}
        )
        held = attributes_of(train, train.graph.nodes)
        graph = copy_graph(evaluation.graph)
        install(self, held)
        install(self, _renamed_apart(held, attributes_of(evaluation, evaluation.graph.nodes), graph))
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
        """That of the present mode."""
        return self.graphs[self.training].graph

    @property
    def current(self) -> GraphModule:
        """The graph of the present mode as a module without state, to read."""
        return self.graphs[self.training]

    @property
    def signature(self) -> Signature:
        """How the graph of the present mode flattens what it is called with."""
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
    """Every graph in a module: those of `TwoModes` too, which are no children."""
    for child in module.modules():
        if isinstance(child, GraphModule):
            yield child
        elif isinstance(child, TwoModes):
            yield from child.graphs.values()


def _mode(training: bool) -> str:
    return "train" if training else "eval"


def _shell(graph: Graph, source: GraphModule) -> LazyGraphModule:
    plain_arguments(graph)
    shell = lazy_module(graph, type(source).__name__, training=source.training)
    shell.meta = dict(source.meta)
    return shell


def _renamed_apart(held: list[Attribute], others: list[Attribute], graph: Graph) -> list[Attribute]:
    """``others``, where a constant or a nested graph has the name of another one under a free name; the graph
    that uses it is changed.
    """
    values = {item.target: item.value for item in held}
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
