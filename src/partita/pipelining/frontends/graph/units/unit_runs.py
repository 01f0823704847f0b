"""The units of a captured graph as pieces that run alone, one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from partita._torch.containers.pytree import tree_map
from partita._torch.operators.fused_attention import FusedAttention
from partita._torch.tensors.detached_copy import detached_copy, detached_leaf_copy
from partita._torch.tensors.storage import storage_key
from partita.pipelining.frontends.cuts.cuts import stage_assignment
from partita.pipelining.frontends.graph.writes import written_inputs, written_parameters
from partita.pipelining.measuring.unit_run import UnitRun
from partita.splitter import split
from partita.splitter.result import Piece

__all__ = ["GraphLoss", "GraphUnit", "graph_units"]

_LOSS = "the loss"
"""No node is called so."""


@dataclass(frozen=True)
class GraphLoss:
    """The loss that a step computes after the last unit.

    Attributes:
        loss_fn: called with what the model returns, and `target`.
        target: of one microbatch.
        unflatten: makes what the model returns from the flat results of the graph.
    """

    loss_fn: Callable[..., Tensor]
    target: Any
    unflatten: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class GraphUnit:
    """One unit of a graph.

    Attributes:
        inputs: names of the values that it takes.
        outputs: names of the values that it returns, the loss last where there is one.
        run: how to run the unit, or one that is equal to it.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: UnitRun | None

    @property
    def written(self) -> frozenset[str]:
        """The names of the inputs that it writes to."""
        copied = self.run.copied if self.run is not None else ()
        return frozenset(self.inputs[position] for position in copied)


def graph_units(
    gm: GraphModule, ends: Sequence[int], args: Sequence[Any], loss: GraphLoss | None = None
) -> list[GraphUnit]:
    """Cut a graph into units, and run each kind of unit once to have the inputs of the next.

    Units of equal structure, shapes and dtypes get the same `UnitRun`. Parameters are shared with ``gm``, but
    not their gradients and hooks; buffers, and parameters that are written to, are copies.

    Args:
        ends: for each unit but the last, the position of the node that it ends with.
        args: one value for each placeholder.
    """
    values: dict[str, Any] = {
        node.name: value
        for node, value in zip((n for n in gm.graph.nodes if n.op == "placeholder"), args, strict=True)
    }
    assignment = stage_assignment(gm, ends)
    pieces = {piece.key: piece for piece in split(gm, assignment).pieces}
    last_users = _last_users(gm, assignment)
    results = _results(gm)
    runs: dict[Any, tuple[UnitRun, Sequence[Any]]] = {}
    units: list[GraphUnit] = []
    last = len(ends)
    for number in range(last + 1):
        piece = pieces.get(number)
        if piece is None:
            units.append(GraphUnit((), (), None))
            continue
        is_last = number == last
        seeded = tuple(is_last or last_users[name] > number for name in piece.outputs)
        if not any(seeded):
            seeded = (True,) * len(seeded)
        key = (piece.structural_hash, *map(_kind, map(values.__getitem__, piece.inputs)), seeded, is_last)
        if key in runs:
            run, outputs = runs[key]
            if not _are_activations(run, outputs):
                outputs = _outputs(_unit_run(piece, values, seeded, is_last=is_last))
        else:
            run = _unit_run(piece, values, seeded, is_last=is_last)
            outputs = _outputs(run)
            if is_last and loss is not None:
                run = _with_loss(run, piece.outputs, results, values, loss)
            runs[key] = (run, outputs)
        values.update(zip(piece.outputs, outputs, strict=True))
        with_loss = (*piece.outputs, _LOSS) if is_last and loss is not None else piece.outputs
        units.append(GraphUnit(piece.inputs, with_loss, run))
    return units


def _last_users(gm: GraphModule, assignment: Mapping[str, int]) -> dict[str, int]:
    """The last unit that uses each value."""
    return {
        node.name: max((assignment.get(user.name, -1) for user in node.users), default=-1)
        for node in gm.graph.nodes
    }


def _results(gm: GraphModule) -> list[Any]:
    """What the graph returns: nodes and constants."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    results = output.args[0]
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _unit_run(piece: Piece, values: Mapping[str, Any], seeded: tuple[bool, ...], *, is_last: bool) -> UnitRun:
    module = _own_copy(piece.module)
    written = written_inputs(piece.module)
    placeholders = [node.name for node in piece.module.graph.nodes if node.op == "placeholder"]
    single = len(piece.outputs) == 1

    def call(*args: Any) -> Sequence[Any]:
        result = module(*args)
        return (result,) if single else result

    return UnitRun(
        piece.name,
        call,
        tuple(_detached(values[name]) for name in piece.inputs),
        tuple(module.parameters()),
        frozenset(position for position, name in enumerate(placeholders) if name in written),
        seeded,
        is_last,
        module,
    )


def _own_copy(module: GraphModule) -> GraphModule:
    """A copy whose parameters share memory with those of ``module`` where nothing writes to it, and have
    gradients and hooks of their own; all other tensors are copies.
    """
    written = {id(module.get_parameter(name)) for name in written_parameters(module)}
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        value = parameter.detach()
        if id(parameter) in written:
            value = value.clone()
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    memo.update((id(buffer), detached_copy(buffer)) for buffer in module.buffers() if not buffer.is_leaf)
    return copy.deepcopy(module, memo)


def _outputs(run: UnitRun) -> Sequence[Any]:
    """What the unit returns, cut off from its history, and from its buffers and the parameters that it writes
    to: it does so when it runs again, and the next unit may have saved them for its backward pass.
    """
    _, arguments = run.leaves()
    with FusedAttention():
        outputs = [_detached(output) for output in run.call(*arguments)]
    own: set[int] = set()
    if isinstance(module := run.module, GraphModule):
        written = map(module.get_parameter, written_parameters(module))
        own.update(map(storage_key, (*module.buffers(), *written)))

    def apart(value: Any) -> Any:
        is_own = isinstance(value, Tensor) and storage_key(value) in own
        return detached_leaf_copy(value) if is_own else value

    return [tree_map(apart, output) for output in outputs]


def _are_activations(run: UnitRun, outputs: Sequence[Any]) -> bool:
    """Whether those of an equal unit may go on in place of the unit's own: what follows works with any.
    Lengths and positions are other ones behind the second of two equal units, and may be indices.
    """
    return bool(run.parameters) and all(
        output.is_floating_point() or output.is_complex() for output in outputs if isinstance(output, Tensor)
    )


def _with_loss(
    run: UnitRun, names: Sequence[str], results: Sequence[Any], values: Mapping[str, Any], loss: GraphLoss
) -> UnitRun:
    """The last unit with the loss behind it, of which it has values of earlier units as well."""
    earlier = {
        item.name: values[item.name] for item in results if isinstance(item, Node) and item.name in values
    }

    def call(*args: Any) -> Sequence[Any]:
        outputs = run.call(*args)
        own = {**earlier, **dict(zip(names, outputs, strict=True))}
        flat = [own[item.name] if isinstance(item, Node) else item for item in results]
        return (*outputs, loss.loss_fn(loss.unflatten(flat), loss.target))

    seeded = (*[False] * len(names), True)
    return UnitRun(
        run.name, call, run.inputs, run.parameters, run.copied, seeded, is_last=True, module=run.module
    )


def _detached(value: Any) -> Any:
    """The same without its history, and outside of inference mode; ``requires_grad`` is kept."""
    if isinstance(value, Tensor):
        return (value.clone() if value.is_inference() else value).detach().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(_detached(item) for item in value)
    return value


def _kind(value: Any) -> Any:
    """What of an input decides how long a unit takes."""
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else ()
        return (type(value), value.shape, strides, value.dtype, value.device, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return repr(value)
