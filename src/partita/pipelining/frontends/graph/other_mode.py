"""Where a model's other graph is cut, if it does something else in training than in evaluation.

The cuts were found in one graph. In the other each operation goes to the stage that its twin is in: the
operation of the same kind in the same call of the same module. What has none (an auxiliary head) goes with
the operations around it, and a module's operations stay together wherever they were together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch.fx import GraphModule, Node

from partita.capture.origin import module_path
from partita.errors import CaptureError
from partita.graph.state import attribute

__all__ = ["check_shared_buffers", "matched_assignment"]

_ADVICE = (
    "cut at the borders of modules that run in both modes, or capture one mode only: pipeline(..., "
    "modes='train') or modes='eval'"
)


def matched_assignment(
    graph: GraphModule, assignment: Mapping[str, int], other: GraphModule
) -> dict[str, int]:
    """The stage of every operation of ``other``.

    Args:
        assignment: the stage of every operation of ``graph``.

    Raises:
        CaptureError: the stages can't be told, would not follow one another, or one would have nothing to
            compute.
    """
    known = dict(_keyed(graph))
    counts = [Counter(key[:2] for key in dict(_keyed(side))) for side in (graph, other)]
    homes: dict[str, set[int]] = {}
    for node in known.values():
        homes.setdefault(module_path(node), set()).add(assignment[node.name])
    twins: dict[str, int | None] = {}
    nearby: dict[str, int] = {}
    for key, node in _keyed(other):
        twin, home = known.get(key), homes.get(key[0], set())
        sure = twin is not None and counts[0][key[:2]] == counts[1][key[:2]]
        twins[node.name] = assignment[twin.name] if twin is not None and sure else None
        if len(home) == 1:
            nearby[node.name] = next(iter(home))
    return _in_order(twins, nearby, max(assignment.values()) + 1)


def _keyed(gm: GraphModule) -> Iterator[tuple[tuple[str, str, int], Node]]:
    """Every operation under its module, its kind, and its number among those."""
    seen: Counter[tuple[str, str]] = Counter()
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            key = (module_path(node), str(node.target))
            yield (*key, seen[key]), node
            seen[key] += 1


def _in_order(twins: Mapping[str, int | None], nearby: Mapping[str, int], count: int) -> dict[str, int]:
    """The stages of twins, and for what has none that of its module, as far as the order of stages allows
    it.
    """
    limits, limit = {}, count - 1
    for name, stage in reversed(list(twins.items())):
        limit = limit if stage is None else min(limit, stage)
        limits[name] = limit
    result: dict[str, int] = {}
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
        result[name] = current
    missing = sorted(set(range(count)) - set(result.values()))
    if missing:
        raise CaptureError(
            f"the model takes another path in its other mode, and stage {missing[0]} would have nothing to "
            f"compute there: {_ADVICE}"
        )
    return result


def check_shared_buffers(
    whole: GraphModule, assignment: Mapping[str, int], other: GraphModule, other_assignment: Mapping[str, int]
) -> None:
    """Refuse a buffer that one mode uses in other stages than the other: what the one writes, the other would
    not see.

    Raises:
        CaptureError: names the buffer and the stages.
    """
    mine, theirs = _buffer_stages(whole, assignment), _buffer_stages(other, other_assignment)
    for name in mine.keys() & theirs.keys():
        if mine[name] != theirs[name]:
            raise CaptureError(
                f"the buffer {name!r} is used by stages {sorted(mine[name])} in one mode and "
                f"{sorted(theirs[name])} in the other, which can't share it across processes: {_ADVICE}"
            )


def _buffer_stages(gm: GraphModule, assignment: Mapping[str, int]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        users = {assignment[user.name] for user in node.users if user.name in assignment}
        if users and attribute(gm, node).kind == "buffer":
            found.setdefault(str(node.target), set()).update(users)
    return found
