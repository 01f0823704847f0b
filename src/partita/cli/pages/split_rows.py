"""From a pipe to the rows of its report."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

import torch
from torch.fx import Graph

from partita._version import __version__
from partita.capture.tracing.module_paths import module_path
from partita.cli.models.user_file import Built
from partita.pipelining.frontends.graph.pipe import GraphPipe
from partita.pipelining.interface.routes import Routes
from partita.pipelining.interface.values import Value
from partita.reporting import (
    CrossingRow,
    PieceRow,
    StagesReport,
    TiedRow,
    outermost_modules,
    summarise_modules,
)

__all__ = ["split_report"]


def split_report(pipe: GraphPipe, built: Built, title: str, note: str) -> StagesReport:
    """Describe the pieces; sizes are those of a microbatch with the example's shapes."""
    flat = pipe.signature.flatten(built.args, built.kwargs)
    routes = pipe.routes.at(pipe.routes.sizes_of(flat), training=pipe.training)
    return StagesReport(
        title,
        note,
        tuple(_pieces(pipe)),
        tuple(_crossings(routes)),
        tuple(TiedRow(tied.names, tied.stages, _bytes(tied.value)) for tied in routes.tied),
        {"partita": __version__, "torch": torch.__version__, "Python": platform.python_version()},
    )


def _pieces(pipe: GraphPipe) -> Iterator[PieceRow]:
    modules = outermost_modules([list(_modules(piece.module.graph)) for piece in pipe.pieces])
    for stage, (piece, names) in enumerate(zip(pipe.pieces, modules, strict=True)):
        parameters, buffers = list(piece.module.parameters()), list(piece.module.buffers())
        yield PieceRow(
            stage,
            summarise_modules(names),
            len(piece.node_names),
            sum(tensor.numel() for tensor in parameters),
            sum(tensor.numel() * tensor.element_size() for tensor in parameters),
            sum(tensor.numel() * tensor.element_size() for tensor in buffers),
        )


def _modules(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.op.startswith("call_") and (path := module_path(node)):
            yield path


def _crossings(routes: Routes) -> Iterator[CrossingRow]:
    for sender, receiver in sorted(routes.edges):
        names = routes.forward.get((sender, receiver), ())
        back = routes.backward.get((receiver, sender), ())
        yield CrossingRow(
            sender,
            receiver,
            tuple(_words(routes.values[name]) for name in dict.fromkeys((*names, *back))),
            _total(routes.values, names),
            _total(routes.values, back),
        )


def _total(values: Mapping[str, Value], names: tuple[str, ...]) -> int:
    return sum(_bytes(values[name]) for name in names)


def _words(value: Value) -> str:
    return value.describe().removesuffix(", with gradient")


def _bytes(value: Value) -> int:
    """The size of a value whose shape has numbers only."""
    count = 1
    for size in value.shape:
        count *= size if isinstance(size, int) else 0
    return count * value.dtype.itemsize
