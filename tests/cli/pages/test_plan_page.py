"""What is told of a plan."""

from __future__ import annotations

from partita.cli.options.plan_options import PlanOptions
from partita.cli.pages.plan_page import Planned, gains_of
from partita.planning import Cluster, CostModel, Unit

COSTS = CostModel(
    tuple(Unit(f"u{n}", 1.0, 2.0, 8, 2, activation_bytes=100, modules=(f"m.{n}",)) for n in range(6)),
    (4,) * 5,
)


def planned(memory: int | None = None) -> Planned:
    options = PlanOptions(Cluster(2, memory_bytes=memory), 4, stages=2, schedules=("1F1B",))
    return Planned.of("model", options, options.candidates(COSTS))


def test_rows_json_and_page_tell_the_same_step() -> None:
    result = planned()
    (row,) = result.rows()
    values = result.as_dict()
    page = result.report((), {"devices": "2"})
    assert (
        row.makespan_s == values["makespan_s"] == page.timeline.makespan_s == result.candidates[0].makespan_s
    )
    assert row.peak == max(values["peak_bytes"]) == max(lane.peak for lane in page.memory)
    assert page.title == "model in 2 stages"
    assert page.environment["devices"] == "2"
    assert [stage.modules for stage in page.stages] == [("m.0-2",), ("m.3-5",)]


def test_what_is_computed_again_is_counted_and_limits_are_kept() -> None:
    result = planned(600)
    (row,) = result.rows()
    assert row.fits
    assert row.note == "1 of 2"
    assert [lane.limit for lane in result.report((), {}).memory] == [600, 600]


def test_a_change_may_gain_or_be_impossible() -> None:
    shares: list[float] = []
    one_more, without = gains_of(planned(480).request, COSTS, shares.append)
    assert one_more.makespan_s is not None
    assert one_more.makespan_s < planned(480).simulation.makespan_s
    assert (without.what, without.makespan_s) == ("without recomputation", None)
    assert without.note
    assert shares == [0.0, 0.5]
