"""What would do where nothing fits, as options."""

from __future__ import annotations

from typing import Any

import pytest

from partita.cli.options.machines import Machines
from partita.cli.options.plan_remedies import in_options
from partita.errors import InfeasiblePlan

NODES = Machines("16xH100", nodes=2, memory="40GB")


@pytest.mark.parametrize(
    ("changes", "machines", "stages_per_rank", "words"),
    [
        ({"recompute": True}, NODES, None, "without --no-recompute it would fit"),
        ({"schedules": None}, NODES, None, "with --schedule auto it would fit"),
        ({"stages": 12}, NODES, 3, "with --stages 12 it would fit"),
        (
            {"parameter_copies": 2.0},
            NODES,
            None,
            "with --parameter-copies 2 (a leaner optimizer) it would fit",
        ),
        ({"microbatches": 4}, NODES, None, "with --microbatches 4 (a smaller batch) it would fit"),
        (
            {"memory_bytes": 45_200_000_000, "ranks": 24},
            NODES,
            2,
            "with --memory 45.2GB or with --devices 24xH100 --nodes 3 --stages 48 it would fit",
        ),
        (
            {"memory_bytes": 96_000_000_000},
            NODES,
            None,
            "with devices of 96 GB (--memory 96GB) it would fit",
        ),
        (
            {"memory_bytes": 800, "ranks": 3},
            None,
            None,
            "with --memory 800B or with 3 ranks it would fit",
        ),
    ],
)
def test_a_change_is_named_by_its_option(
    changes: dict[str, Any], machines: Machines | None, stages_per_rank: int | None, words: str
) -> None:
    error = InfeasiblePlan("nothing fits; with x=1", "nothing fits", changes)
    again = in_options(error, machines, stages_per_rank)
    assert str(again) == f"nothing fits; {words}"
    assert (again.reason, again.changes) == (error.reason, changes)


def test_without_a_change_what_was_said_for_python_is_left_out() -> None:
    whole = in_options(InfeasiblePlan("no schedule can serve these numbers"), None, None)
    assert str(whole) == "no schedule can serve these numbers"
    many = in_options(InfeasiblePlan("too many: measure by smaller units", "too many"), None, None)
    assert str(many) == "too many; take fewer ranks or stages"
