"""Which variables are read later."""

from __future__ import annotations

import sys
from typing import Any

from partita.pipelining.blocks.replaying.liveness import variables_read_later


def _now(depth: int = 1) -> set[str]:
    frame = sys._getframe(depth)
    return set(variables_read_later(frame.f_code, frame.f_lasti))


def test_what_is_written_first_is_not_read() -> None:
    def steps(old: Any, new: Any) -> Any:
        old = _now()
        return old, new

    assert steps(1, 2)[0] == {"new"}


def test_a_loop_reads_again_and_a_branch_may_read() -> None:
    def steps(items: list[int], x: int, side: int, dead: int) -> list[set[str]]:
        live = []
        for item in items:
            live.append(_now())
            if item > 10:
                x = side
        return [*live, {str(x)}]

    assert steps([1, 2], 3, 4, 5)[0] == {"live", "item", "side", "x"}
