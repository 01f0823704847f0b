"""The units of a captured graph: where they end, and what each of them costs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from partita._torch.autograd.region_switches import REGION_SWITCHES
from partita._torch.fake.shapes import fake_values
from partita._torch.operators.roofline import Speeds
from partita._torch.tensors.storage import has_memory
from partita.capture.one_thread_at_a_time import one_thread_at_a_time
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.tracing.module_paths import module_path
from partita.errors import PartitaError, PlanError
from partita.graph.attributes import lookup
from partita.graph.levels import inside_levels
from partita.graph.liveness import Border, borders
from partita.pipelining.frontends.cuts.cuts import COMPUTES_NOTHING
from partita.pipelining.frontends.graph.branches import branch_nodes
from partita.pipelining.frontends.graph.units.unit_runs import GraphLoss, GraphUnit, graph_units
from partita.pipelining.frontends.graph.writes import uncut_positions
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.measuring.costed_for import costed_for
from partita.pipelining.measuring.kept_memory import kept_memory
from partita.pipelining.measuring.meter import meter_for
from partita.pipelining.measuring.pass_memory import PassMemory, pass_memory
from partita.pipelining.measuring.pass_times import UnitTimes, pass_times
from partita.planning import CostModel, TiedUnits, Unit

__all__ = ["REPEATS", "cost_model", "narrow_borders", "unit_ends", "unit_names"]

REPEATS = 5
"""How often each pass is timed, after a round that does not count. The median counts."""

_WINDOWS = (64, 16, 4, 0)
"""How many borders to either side a border is compared with; the first that gives enough units counts."""


_AS_NARROW = 1.2
"""So many more bytes may cross a border than the narrowest in its window: those of small tables (rotary
embeddings), and not another activation.
"""
_NEARBY = 8
"""How many borders to either side are of the same block."""


def unit_ends(gm: GraphModule) -> Iterator[list[int]]:
    """The positions of the nodes that units end with, all but the last, for smaller and smaller units.

    In a small model a value may go past all blocks (to scale the result back, say). Borders before that value
    is made are narrower then than those between the blocks, and only a small window leaves the latter. No
    unit ends within memory that is written, or within a level of ``torch.func``.
    """
    nodes = list(gm.graph.nodes)
    # A result goes straight from where it is made to the end: it does not tell one place to cut from another.
    ignored, uncut = _not_sent(gm), uncut_positions(gm) | inside_levels(gm)
    passing = [gap for gap in _borders(gm, results=False) if gap.after not in uncut]
    for window in _WINDOWS:
        yield [gap.after for gap in narrow_borders(nodes, passing, window, ignored=ignored)]


def unit_names(gm: GraphModule, ends: Sequence[int]) -> list[str]:
    """The names of the units that end there, each its number and its last operation. They are the same
    whichever sizes were left open.
    """
    names, ignored = [], _not_sent(gm)
    for number, nodes in enumerate(_unit_nodes(gm, ends)):
        named = [node.name for node in nodes if _acts(node, ignored) and not _is_view(node)]
        # Without the number that tells it from others of its kind, and that depends on how it was traced.
        last = re.sub(r"_[0-9]+$", "", named[-1]) if named else "inputs"
        names.append(f"{number}:{last}")
    return names


@one_thread_at_a_time()
def cost_model(
    gm: GraphModule,
    ends: Sequence[int],
    args: Sequence[Any],
    *,
    repeats: int = REPEATS,
    speeds: Speeds | None = None,
    loss: GraphLoss | None = None,
    progress: Callable[[float], None] | None = None,
    compile_options: CompileOptions | None = None,
) -> CostModel:
    """Run each unit of a graph alone, as a stage would, and return what it costs. Units that are equal are
    run once. Gradients are on, whatever the caller's grad mode; neither ``gm`` nor ``args`` nor the state of
    torch's generators change.

    Args:
        ends: see `unit_ends`.
        args: one value for each placeholder.
        repeats: how many runs count.
        speeds: of the device that seconds are worked out for, instead of being measured.
        loss: computed behind the last unit.
        progress: called with the share of the work that is done, from 0.0 to 1.0.
        compile_options: how the stages will be compiled: seconds are those of compiled units. Bytes are those
            of uncompiled ones.

    Raises:
        PlanError: a unit can't be run, as one whose backward pass raises.
        CaptureError: on the meta device, a shape or number depends on data; names the node and its line.
    """
    # Run each kind of unit alone: for its memory, then for its times.
    tensors = [value for value in (*gm.parameters(), *gm.buffers(), *args) if isinstance(value, Tensor)]
    devices = sorted({tensor.device for tensor in tensors if tensor.device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices), torch.enable_grad():
        with _runs_alone():
            units = _runnable_units(gm, ends, args, loss)
            runs = list({id(unit.run): unit.run for unit in units if unit.run is not None}.values())
            memories = {id(run): pass_memory(run) for run in runs}
        if compile_options is not None:
            for run in runs:
                run.compile(compile_options)
        measured = pass_times(runs, meter_for(tensors, speeds), repeats, progress)
    times = dict(zip(map(id, runs), measured, strict=True))
    # Attribute what is kept, over all units.
    placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    kept = kept_memory(
        units,
        [memories.get(id(unit.run)) for unit in units],
        dict(zip(placeholders, args, strict=True)),
        results=[node.name for node in gm.graph.output_node().all_input_nodes],
        written=[unit.written for unit in units],
    )
    # One row a unit.
    sizes = {gap.after: gap.bytes for gap in _borders(gm)}
    unit_nodes = list(_unit_nodes(gm, ends))
    parameters = [_parameters(gm, nodes) for nodes in unit_nodes]
    numbers = {id(run): number for number, run in enumerate(runs)}
    kinds = [None if unit.run is None else numbers[id(unit.run)] for unit in units]
    rows = zip(unit_names(gm, ends), unit_nodes, parameters, units, kinds, strict=True)
    return CostModel(
        tuple(
            _unit(name, nodes, own, times.get(id(unit.run)), memories.get(id(unit.run)), sizes_kept, kind)
            for (name, nodes, own, unit, kind), sizes_kept in zip(
                rows, zip(kept.activations, kept.left, strict=True), strict=True
            )
        ),
        tuple(sizes[end] for end in ends),
        kept.gradients,
        entry_bytes=kept.entry,
        entry_left_bytes=kept.entry_left,
        exit_bytes=kept.exit,
        passing_bytes=kept.passing,
        returned_bytes=kept.returned,
        spanning=kept.spanning,
        shared_gradients=kept.shared_gradients,
        tied=_tied(parameters),
        costed_for=None if speeds is None else costed_for(gm.parameters(), speeds),
    )


def _runnable_units(
    gm: GraphModule, ends: Sequence[int], args: Sequence[Any], loss: GraphLoss | None
) -> list[GraphUnit]:
    """The units, each of which has run once."""
    try:
        return graph_units(gm, ends, args, loss)
    except RuntimeError:
        if not all(has_memory(arg) for arg in (*gm.parameters(), *args) if isinstance(arg, Tensor)):
            fake_values(gm, args, grad=False)  # names what depends on data, which the meta device has not
        raise


@contextmanager
def _runs_alone() -> Iterator[None]:
    """Raise a PlanError where a unit that is run in this block raises."""
    try:
        yield
    except (torch.OutOfMemoryError, PartitaError):
        raise
    except Exception as error:  # whatever the user's model raises
        reason = str(error).partition("\n")[0].rstrip(".")
        raise PlanError(
            "where to cut is planned from passes that are measured, and a part of the model raises "
            f"{type(error).__name__} in them: {reason}. Mend that; or, of a model that only infers, freeze "
            "the parameters (model.requires_grad_(False)); or say where to cut (split_spec)"
        ) from error


def _borders(gm: GraphModule, *, results: bool = True) -> list[Border]:
    nodes = list(gm.graph.nodes)
    index = {node: position for position, node in enumerate(nodes)}
    return borders(nodes, index, ignored=_not_sent(gm), results=results)


def _not_sent(gm: GraphModule) -> set[str]:
    """The names of the nodes that each stage works out by itself: sizes, and ways of the model that depend on
    data. No unit ends with one or is named after one: how many there are depends on which sizes are open. Nor
    is a region sent, such as that of autocast: each stage enters its own.
    """
    switches = REGION_SWITCHES | {torch.is_grad_enabled}  # the mode that a region of its own ends with
    regions = (node.name for node in gm.graph.nodes if node.target in switches)
    return {*Sizes.of(gm).numbers, *(node.name for node in branch_nodes(gm)), *regions}


def _unit_nodes(gm: GraphModule, ends: Sequence[int]) -> Iterator[list[Node]]:
    nodes = list(gm.graph.nodes)
    start = 0
    for end in [*ends, len(nodes) - 1]:
        yield nodes[start : end + 1]
        start = end + 1


def narrow_borders(
    nodes: Sequence[Node],
    gaps: Sequence[Border],
    window: int = _WINDOWS[0],
    *,
    ignored: Collection[str] = (),
) -> list[Border]:
    """Return the borders at which a cut makes sense: only tensors cross, and fewer of them, or clearly fewer
    bytes, cross at no neighbouring border.

    Between two transformer blocks one tensor crosses, within a block two or more; in the middle of a U-Net
    all of its skips do. Operations lie on both sides.

    Args:
        window: how many borders to either side count as neighbours.
        ignored: names of nodes that no stage sends, because each works them out by itself.
    """
    acts = [_acts(node, ignored) for node in nodes]
    computes = [acts_here and not _is_view(node) for node, acts_here in zip(nodes, acts, strict=True)]
    first = next((position for position, does in enumerate(computes) if does), len(nodes))
    last = max((position for position, does in enumerate(computes) if does), default=-1)
    inner = [
        gap
        for gap in gaps
        if first <= gap.after < last and acts[gap.after] and not gap.others and gap.tensors
    ]
    fewest = _window_minima([gap.tensors for gap in inner], window)
    # Where small tables go past all blocks but the first ones, the borders between the others are as narrow
    # in bytes, and have the fewest tensors of their neighbourhood.
    nearby = _window_minima([gap.tensors for gap in inner], min(window, _NEARBY))
    least = _window_minima([gap.bytes for gap in inner], window)
    chosen = [
        gap
        for gap, tensors, close, size in zip(inner, fewest, nearby, least, strict=True)
        if gap.tensors == tensors or (gap.tensors == close and gap.bytes <= _AS_NARROW * size)
    ]
    # Of several borders in a row with nothing but views between them, the narrowest is enough.
    apart: list[Border] = []
    for gap in chosen:
        if not apart or any(computes[apart[-1].after + 1 : gap.after + 1]):
            apart.append(gap)
        elif gap.bytes < apart[-1].bytes:
            apart[-1] = gap
    return apart


def _acts(node: Node, ignored: Collection[str]) -> bool:
    """Whether a node does something, and its name is not one of those to ignore."""
    return node.op.startswith("call_") and node.target not in COMPUTES_NOTHING and node.name not in ignored


def _is_view(node: Node) -> bool:
    """Whether a node only looks at memory in another way."""
    return bool(getattr(node.target, "is_view", False))


def _window_minima(numbers: Sequence[int], reach: int) -> list[int]:
    """For each place the least number within ``reach`` places to either side, in linear time."""
    minima, candidates, ahead = [], deque[int](), 0
    for place in range(len(numbers)):
        while ahead < min(len(numbers), place + reach + 1):
            while candidates and numbers[candidates[-1]] >= numbers[ahead]:
                candidates.pop()
            candidates.append(ahead)
            ahead += 1
        while candidates[0] < place - reach:
            candidates.popleft()
        minima.append(numbers[candidates[0]])
    return minima


def _parameters(gm: GraphModule, nodes: Sequence[Node]) -> dict[int, torch.nn.Parameter]:
    """The parameters that nodes use, by identity."""
    parameters: dict[int, torch.nn.Parameter] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and isinstance(value := lookup(gm, operand), torch.nn.Parameter):
                parameters[id(value)] = value
    return parameters


def _tied(parameters: Sequence[dict[int, torch.nn.Parameter]]) -> tuple[TiedUnits, ...]:
    """The parameters that several units use, together where these are the same units."""
    users: dict[int, list[int]] = {}
    for unit, own in enumerate(parameters):
        for key in own:
            users.setdefault(key, []).append(unit)
    together: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
    for key, units in users.items():
        if len(units) > 1:
            together.setdefault(tuple(units), []).append(parameters[units[0]][key])
    return tuple(
        TiedUnits(units, *_sizes(values), _sizes(value for value in values if value.requires_grad)[0])
        for units, values in together.items()
    )


def _sizes(parameters: Iterable[torch.nn.Parameter]) -> tuple[int, int]:
    """The bytes of parameters, and how many numbers they hold."""
    sizes = [(value.numel() * value.element_size(), value.numel()) for value in parameters]
    return sum(size for size, _ in sizes), sum(count for _, count in sizes)


def _unit(
    name: str,
    nodes: Sequence[Node],
    parameters: dict[int, torch.nn.Parameter],
    times: UnitTimes | None,
    memory: PassMemory | None,
    kept: tuple[int, int],
    kind: int | None,
) -> Unit:
    size, count = _sizes(parameters.values())
    modules = dict.fromkeys(
        path for node in nodes if node.op.startswith("call_") and (path := module_path(node))
    )
    return Unit(
        name=name,
        forward_s=times.forward_s if times is not None else 0.0,
        backward_s=times.backward_s if times is not None else 0.0,
        parameter_bytes=size,
        parameters=count,
        activation_bytes=kept[0],
        modules=tuple(modules),
        backward_input_s=times.input_s if times is not None else 0.0,
        backward_weight_s=times.weight_s if times is not None else 0.0,
        weight_activation_bytes=kept[1],
        caught_bytes=memory.caught_bytes if memory is not None else 0,
        copied_gradient_bytes=memory.copied_gradient_bytes if memory is not None else 0,
        has_weights=memory is not None and memory.has_weights,
        forward_workspace_bytes=memory.forward_workspace_bytes if memory is not None else 0,
        backward_workspace_bytes=memory.backward_workspace_bytes if memory is not None else 0,
        input_workspace_bytes=memory.input_workspace_bytes if memory is not None else 0,
        weight_workspace_bytes=memory.weight_workspace_bytes if memory is not None else 0,
        spread=times.spread if times is not None else 0.0,
        kind=kind,
    )
