"""What ``partita plan`` says of values that go past stages and are most of what these send."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from partita.planning import CostModel, Plan
from partita.reporting import format_bytes

__all__ = ["large_value_words"]

_MOST_VALUES = 3


def large_value_words(costs: CostModel, plan: Plan) -> Iterator[str]:
    """One line for each value that several stages behind its maker's use, and that is at least half of what
    the busiest stage sends (a table of positions that all layers of T5 add). The largest come first.
    """
    ends = [stage.last_unit for stage in plan.stages]
    busiest = max(stage.send_bytes for stage in plan.stages)
    lines: list[tuple[int, str]] = []
    for value in costs.spanning:
        maker = bisect_left(ends, max(value.maker, 0))
        users = sorted({bisect_left(ends, user) for user in value.users} - {maker})
        size = value.sent_bytes(ends[maker])
        if len(users) < 2 or 2 * size < busiest:
            continue
        unit = costs.units[max(value.maker, 0)]
        source = f"made by {(*unit.modules, unit.name)[0]} in stage {maker}"
        if value.maker < 0:
            source = "given to the model"
        where = f"{len(users)} others ({users[0]} to {users[-1]})"
        words = (
            f"{format_bytes(size)} of what is sent is one value, {source} and used in {where}: it is sent to "
        )
        lines.append((size, words + "each of them for every microbatch"))
    lines.sort(key=lambda line: -line[0])
    yield from (words for _, words in lines[:_MOST_VALUES])
