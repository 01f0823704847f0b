"""Files that torch's pipelining writes load here, and the other way round. Only this file imports torch."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as theirs

from partita.planning import Action, ActionKind, Schedule, get_schedule, lower, schedule_names, validate


def torchs_actions(text: str) -> list[list[object]]:
    return [[theirs._Action.from_str(cell) for cell in line] for line in csv.reader(io.StringIO(text))]


def test_the_kinds_are_torchs() -> None:
    assert {kind.value for kind in ActionKind} == {kind.value for kind in theirs._ComputationType}


@pytest.mark.parametrize(
    "text",
    ["2F0", "0SEND_F1", "1RECV_B2", "1UNSHARD", "1RESHARD", "3REDUCE_GRAD", "0I1", "(0F1;1B0)OVERLAP_F_B"],
)
def test_torch_reads_each_action_as_we_do(text: str) -> None:
    there, here = theirs._Action.from_str(text), Action.parse(text)
    assert there is not None
    assert (there.stage_index, there.computation_type.value, there.microbatch_index) == (
        here.stage,
        here.kind.value,
        here.microbatch,
    )
    assert str(there) == str(here)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("change", [lambda schedule: schedule, lower], ids=["compute", "lowered"])
def test_torch_reads_what_is_written_here(name: str, change) -> None:  # type: ignore[no-untyped-def]
    schedule = change(get_schedule(name)(stages=4, microbatches=6, ranks=2))
    there = torchs_actions(schedule.to_csv())
    assert [["" if a is None else str(a) for a in row] for row in there] == [
        ["" if a is None else str(a) for a in row] for row in schedule.rows
    ]


class WithRows(theirs._PipelineScheduleRuntime):
    """torch's schedule with rows of our choosing: enough of it to write and read files."""

    def __init__(self, rows: dict[int, list[object]]) -> None:
        self.pipeline_order = self.pipeline_order_with_comms = rows


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", schedule_names())
def test_a_file_that_torch_writes_loads_here(name: str, form: str, tmp_path: Path) -> None:
    ours = get_schedule(name)(stages=4, microbatches=6, ranks=2)
    rows = dict(enumerate(torchs_actions(ours.to_csv())))
    if form == "compute_comms":
        compact = {rank: [action for action in row if action is not None] for rank, row in rows.items()}
        rows = theirs._add_send_recv(compact, ours.stage_ranks.__getitem__, ours.stages)
    path = tmp_path / "schedule.csv"
    WithRows(rows)._dump_csv(str(path), form)
    loaded = Schedule.from_csv(path.read_text(), name=name)
    assert loaded.compute_only().without_idle() == ours.without_idle()
    assert loaded.is_lowered == (form == "compute_comms")
    validate(loaded)
