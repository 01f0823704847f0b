"""Where parameters are gathered and freed, and gradients reduced: torch writes the same."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as theirs

from partita.planning import Action, get_schedule, schedule_names, with_reduce_grad, with_unshard


def _row(text: str) -> list[Action | None]:
    return [Action.from_str(cell) for cell in text.split(",")]


def _text(row: object) -> list[str]:
    return [str(action) for action in row]  # type: ignore[attr-defined]


def test_stages_are_gathered_ahead_and_freed_when_others_come_first() -> None:
    row = _row("0F0,,1F0,1B0,0B0")
    assert " ".join(_text(with_unshard(row, most=1))) == (
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    )
    assert " ".join(_text(with_unshard(row))) == ("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0 0RESHARD")


def test_two_stages_that_run_together_are_both_gathered() -> None:
    found = _text(with_unshard(_row("(0F1;1B0)OVERLAP_F_B"), most=1))
    assert found == ["0UNSHARD", "1UNSHARD", "(0F1;1B0)OVERLAP_F_B", "0RESHARD", "1RESHARD"]


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "ForwardOnly"])
def test_torch_writes_the_same(name: str) -> None:
    schedule = get_schedule(name)(stages=4, microbatches=4, ranks=2 if name not in ("1F1B", "GPipe") else 4)
    for row in schedule.rows:
        there = [None if action is None else theirs._Action.from_str(str(action)) for action in row]
        assert _text(with_reduce_grad(row, 4)) == _text(theirs._add_reduce_grad(list(there), 4))
        gathered = _text(theirs._add_unshard_reshard(list(there)))
        assert _text(with_unshard(row)) == gathered
