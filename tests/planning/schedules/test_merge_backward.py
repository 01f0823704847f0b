from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as theirs

from partita.planning import Action, get_schedule, merge_backward


def _row(text: str) -> list[Action | None]:
    return [Action.from_str(cell) for cell in text.split(",")]


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        ("0I0,0W0", "0B0"),
        ("0I0,,0W0", "0B0"),
        ("0I0,0W1", "0I0 0W1"),
        ("0I0,1W0", "0I0 1W0"),
        ("0I0,0F1,0W0", "0I0 0F1 0W0"),
        ("0B0,0W1", "0B0 0W1"),
    ],
)
def test_halves_that_follow_each_other_are_merged(text: str, merged: str) -> None:
    assert " ".join(map(str, merge_backward(_row(text)))) == merged


def test_torch_merges_the_same() -> None:
    for row in get_schedule("ZBVZeroBubble")(stages=4, microbatches=6, ranks=2).rows:
        there = [None if action is None else theirs._Action.from_str(str(action)) for action in row]
        assert list(map(str, merge_backward(row))) == list(map(str, theirs._merge_bw(there)))
