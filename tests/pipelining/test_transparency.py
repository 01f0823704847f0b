"""A pipeline equals the uncut model: outputs, losses, gradients, buffers, bit for bit."""

from __future__ import annotations

import pytest
from tests.pipelining.models import CASES, IN_PLACE, SKIP, TRANSFORMER, Case
from tests.pipelining.running import assert_same, cut, piped, uncut

from partita.pipelining import Schedule1F1B, ScheduleGPipe
from partita.pipelining.schedules import PipelineSchedule

SCHEDULES = pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B], ids=lambda kind: kind.kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stages"),
    [
        pytest.param(case, stages, marks=[] if stages > len(case.after) else [pytest.mark.dear])
        for case in CASES
        for stages in range(1, len(case.after) + 2)
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_training_equals_the_uncut_model(case: Case, stages: int) -> None:
    for kind in (ScheduleGPipe, Schedule1F1B):
        assert_same(piped(cut(case, stages), case, kind), uncut(case))


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 2, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("case", [TRANSFORMER, SKIP, IN_PLACE], ids=lambda case: case.name)
@SCHEDULES
def test_a_rank_may_hold_any_stages(
    kind: type[PipelineSchedule], case: Case, placement: tuple[int, ...]
) -> None:
    assert_same(piped(cut(case, 4), case, kind, placement=placement), uncut(case))


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@SCHEDULES
def test_any_number_of_microbatches(kind: type[PipelineSchedule], microbatches: int) -> None:
    case = SKIP
    pipe = cut(case, 3, 8 // microbatches)
    assert_same(piped(pipe, case, kind, microbatches), uncut(case, microbatches))
