"""Stages for the graph of a model's other mode, if it takes another path in training than in evaluation.

The cuts were found in one graph. In the other each operation goes to the stage of its twin: the operation of
the same kind in the same call of the same module. An operation without a twin (of an auxiliary head) goes
with those around it, but to the stage that has its buffers in the first graph, or all of its module. What
follows from the model's state alone goes to the stage that has its buffers in the first graph. Parameters
that a graph writes to (an average of other weights) count as buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate

from torch.fx import GraphModule, Node

from partita.capture import Captured
from partita.capture.merging.modes import captured_mode, captures_training, drop_mode_check
from partita.capture.tracing.module_paths import module_path
from partita.errors import CaptureError
from partita.graph.ancestors import ancestors
from partita.graph.attributes import attribute
from partita.pipelining.frontends.cuts.cuts import stage_assignment
from partita.pipelining.frontends.graph.writes import written_parameters

__all__ = ["by_mode", "check_shared_buffers", "ends_in_both_modes", "matched_assignment"]

_ADVICE = (
    "cut at the borders of modules that run in both modes, or capture one mode only: pipeline(..., "
    "modes='train') or modes='eval'"
)


def matched_assignment(
    graph: GraphModule, assignment: Mapping[str, int], other: GraphModule
) -> dict[str, int]:
    """Return the stage of every operation of ``other``.

    Args:
        assignment: the stage of every operation of ``graph``.

    Raises:
        CaptureError: stages would not follow one another, or one would have nothing to compute.
    """
    count = max(assignment.values()) + 1
    stages = _in_order(*_twins(graph, assignment, other), count)
    missing = sorted(set(range(count)) - set(stages.values()))
    if missing:
        raise CaptureError(
            f"the model takes another path in its other mode, and stage {missing[0]} would have nothing to "
            f"compute there: {_ADVICE}"
        )
    written = _written_state(graph, other)
    return _beside_buffers(_buffer_stages(graph, assignment, written), other, stages, written)


def ends_in_both_modes(graph: GraphModule, ends: Sequence[int], other: GraphModule) -> list[int]:
    """Those of ``ends`` (positions of nodes of ``graph``) at which stages can end in ``other`` too: whichever
    of them a plan takes, stages follow one another there, each has something to compute, and the buffers that
    it has.

    An end between operations that only one mode has (a VAE's noise) leaves the other what it had without.
    """
    units = stage_assignment(graph, ends)
    twins, nearby = _twins(graph, units, other)
    together: set[int] = set()  # units that can't be parted from the next one, for the other mode turns back
    furthest = 0
    for unit in twins.values():
        if unit is not None:
            together.update(range(unit, furthest))
            furthest = max(furthest, unit)
    count = max(units.values(), default=0) + 1
    groups = list(accumulate((unit not in together for unit in range(count - 1)), initial=0))
    stages = _in_order(
        {name: None if unit is None else groups[unit] for name, unit in twins.items()},
        {name: groups[unit] for name, unit in nearby.items()},
        groups[-1] + 1,
    )
    written = _written_state(graph, other)
    homes = _buffer_stages(graph, {name: groups[unit] for name, unit in units.items()}, written)
    used = _buffer_stages(other, _beside_buffers(homes, other, stages, written), written)
    for name in homes.keys() & used.keys():
        if homes[name] != used[name]:
            both = homes[name] | used[name]
            together.update(unit for unit, group in enumerate(groups) if min(both) <= group < max(both))
    computing = set(stages.values())
    chosen = [
        end
        for end, unit in zip(ends, _units_before(graph, ends, units), strict=True)
        if unit not in together and groups[unit] in computing
    ]
    return chosen if groups[-1] in computing else chosen[:-1]


def _units_before(graph: GraphModule, ends: Sequence[int], units: Mapping[str, int]) -> Iterator[int]:
    """For each end the unit of the last operation before it."""
    nodes = list(graph.graph.nodes)
    unit, position = 0, 0
    for end in ends:
        for node in nodes[position : end + 1]:
            unit = units.get(node.name, unit)
        position = end + 1
        yield unit


def _twins(
    graph: GraphModule, assignment: Mapping[str, int], other: GraphModule
) -> tuple[dict[str, int | None], dict[str, int]]:
    """For every operation of ``other`` the stage of its twin, None where it has none; and the stage of the
    buffers that it uses, or else of its module, where that is one.
    """
    by_key = dict(_keyed(graph))
    counts = [Counter(key[:2] for key, _ in _keyed(side)) for side in (graph, other)]
    homes: dict[str, set[int]] = {}
    for node in by_key.values():
        homes.setdefault(module_path(node), set()).add(assignment[node.name])
    twins: dict[str, int | None] = {}
    nearby: dict[str, int] = {}
    of_buffers = _stages_of_buffers(other, _buffer_stages(graph, assignment, _written_state(graph, other)))
    for key, node in _keyed(other):
        twin, home = by_key.get(key), of_buffers.get(node) or homes.get(key[0], set())
        certain = counts[0][key[:2]] == counts[1][key[:2]]
        twins[node.name] = assignment[twin.name] if twin is not None and certain else None
        if len(home) == 1:
            nearby[node.name] = next(iter(home))
    return twins, nearby


def _stages_of_buffers(gm: GraphModule, homes: Mapping[str, set[int]]) -> dict[Node, set[int]]:
    """For the operations that use buffers, themselves or by what is computed of state alone, the stages that
    have those buffers.
    """
    of_state = _of_state(gm)
    stages: dict[Node, set[int]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            stages[node] = homes.get(str(node.target), set())
        else:
            operands = of_state.intersection(node.all_input_nodes)
            stages[node] = set().union(*(stages[operand] for operand in operands))
    return stages


def _keyed(gm: GraphModule) -> Iterator[tuple[tuple[str, str, int], Node]]:
    """Every operation with its module, its kind, and its number among those of that kind."""
    seen: Counter[tuple[str, str]] = Counter()
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            key = (module_path(node), str(node.target))
            yield (*key, seen[key]), node
            seen[key] += 1


def _in_order(twins: Mapping[str, int | None], nearby: Mapping[str, int], count: int) -> dict[str, int]:
    """The stages of the twins; for an operation without one the stage of its module, as far as the order of
    stages allows that.
    """
    limits, limit = {}, count - 1
    for name, stage in reversed(list(twins.items())):
        limit = limit if stage is None else min(limit, stage)
        limits[name] = limit
    stages: dict[str, int] = {}
    current, before = 0, ""
    for name, stage in twins.items():
        if stage is not None and stage < current:
            raise CaptureError(
                f"the model takes another path in its other mode, and there {name!r}, which belongs to stage "
                f"{stage}, runs after {before!r} of stage {current}: {_ADVICE}"
            )
        if stage is None:
            stage = max(current, min(nearby.get(name, current), limits[name]))
        current = stage
        before = name
        stages[name] = current
    return stages


def _beside_buffers(
    homes: Mapping[str, set[int]], other: GraphModule, stages: Mapping[str, int], written: Set[str]
) -> dict[str, int]:
    """Move what is computed of state alone, and uses a buffer, to the earlier stage that has the buffer in
    the first graph: a spectral norm reads in evaluation the vectors that it writes in training.
    """
    moved = dict(stages)
    of_state = _of_state(other)
    for node in other.graph.find_nodes(op="get_attr"):
        home = homes.get(str(node.target), set()) if _is_buffer(other, node, written) else set()
        for user in of_state.intersection(node.users) if len(home) == 1 else ():
            first = min(home)
            if moved.get(user.name, first) > first:
                moved |= {one.name: first for one in ancestors([user]) if moved.get(one.name, first) > first}
    return moved if set(moved.values()) == set(stages.values()) else dict(stages)


def _of_state(gm: GraphModule) -> set[Node]:
    """The operations that use no input of the model."""
    nodes: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and nodes.issuperset(node.all_input_nodes)):
            nodes.add(node)
    return nodes


def check_shared_buffers(
    whole: GraphModule, assignment: Mapping[str, int], other: GraphModule, other_assignment: Mapping[str, int]
) -> None:
    """Check that each buffer is used by the same stages in both modes, so that each sees what the other
    writes; likewise each parameter that a graph writes to.

    Raises:
        CaptureError: names the buffer and the stages.
    """
    written = _written_state(whole, other)
    mine = _buffer_stages(whole, assignment, written)
    theirs = _buffer_stages(other, other_assignment, written)
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            kind, which = ("parameter", ", which forward writes to,") if name in written else ("buffer", "")
            raise CaptureError(
                f"the {kind} {name!r}{which} is used by stages {sorted(mine[name])} in one mode and "
                f"{sorted(theirs[name])} in the other, which can't share it across processes: {_ADVICE}"
            )


def _written_state(graph: GraphModule, other: GraphModule) -> frozenset[str]:
    """The names of the parameters that either graph writes to."""
    return written_parameters(graph) | written_parameters(other)


def _buffer_stages(gm: GraphModule, assignment: Mapping[str, int], written: Set[str]) -> dict[str, set[int]]:
    """The stages that use each buffer, and each of the parameters ``written``."""
    stages: dict[str, set[int]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        users = {assignment[user.name] for user in node.users if user.name in assignment}
        if users and _is_buffer(gm, node, written):
            stages.setdefault(str(node.target), set()).update(users)
    return stages


def _is_buffer(gm: GraphModule, node: Node, written: Set[str]) -> bool:
    return str(node.target) in written or attribute(gm, node).kind == "buffer"


def by_mode(captured: Captured) -> tuple[Captured, Captured | None]:
    """The graph that is cut first, and that of evaluation where it is another one.

    A graph that was captured for one mode only is put into that mode.
    """
    if captured.other is None:
        only = captured_mode(captured.module)
        if only is not None:
            captured.module.train(only)
        return captured, None
    train, evaluation = captured, captured.other
    if not captures_training(train.module):
        train, evaluation = replace(evaluation, proof=captured.proof), train
    for graph, training in ((train.module, True), (evaluation.module, False)):
        drop_mode_check(graph)
        graph.train(training)
    return train, evaluation
