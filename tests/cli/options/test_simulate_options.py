"""What ``partita simulate`` is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from partita.cli.options.schedule_cases import simulate_cases
from partita.cli.options.simulate_options import SimulateOptions
from partita.errors import UsageError
from partita.planning import Cluster, CostModel, Unit, plan_stages


def options(
    memory: str | None = None, activation: str | None = None, stages: int | None = None
) -> SimulateOptions:
    return SimulateOptions(2, stages, 4, "1F1B,VHalf", ("1ms", None, None), None, activation, None, memory)


def test_memory_is_counted_in_microbatches_until_somebody_says_how_large_they_are() -> None:
    assert options().of_times().unit == "microbatches"
    assert options("2.5").of_times().limits == (2.5,) * 2
    sized = options("3GB", "1GB").of_times()
    assert (sized.unit, sized.limits) == ("bytes", (3 * 10**9,) * 2)


def test_each_rank_of_a_plan_has_the_memory_of_its_own_device(tmp_path: Path) -> None:
    """For devices that differ there was no limit at all, and what was too much seemed to fit."""
    units = tuple(Unit(f"block{number}", 0.001, 0.002, activation_bytes=10) for number in range(4))
    plan = plan_stages(CostModel(units, (0,) * 3), 2, cluster=Cluster(2, memories=(1000, 60)), microbatches=8)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    asked = SimulateOptions(None, None, None, "GPipe,1F1B", (None, None, None), None, None, None, None)
    subject = asked.of_file(path)
    assert subject.limits == (1000, 60)
    simulated, _ = simulate_cases(subject.cases, lambda _: None)
    assert {one.case.name: subject.fits(one) for one in simulated} == {"GPipe": False, "1F1B": True}
    described = subject.as_dict(simulated, {})
    assert (described["memory_limit"], described["memory_limits"]) == (60, [1000, 60])


@pytest.mark.parametrize("memory", ["80GB", "many", "-1", "0"])
def test_a_limit_that_is_no_number_of_microbatches_is_refused(memory: str) -> None:
    with pytest.raises(UsageError, match="--memory is"):
        options(memory).of_times()


def test_a_peak_is_that_of_a_rank_with_all_of_its_stages() -> None:
    subject = options().of_times()
    simulated, refused = simulate_cases(subject.cases, lambda _: None)
    assert not refused
    assert {one.case.name: subject.peak(one) for one in simulated} == {"1F1B": 2.0, "VHalf": 2.0}
    assert sorted(simulated, key=subject.order)[0].case.name == "VHalf"


def test_a_trace_has_memory_where_it_is_in_bytes() -> None:
    for subject, has_memory in ((options().of_times(), False), (options(None, "1GB").of_times(), True)):
        simulated, _ = simulate_cases(subject.cases, lambda _: None)
        events = json.loads(subject.trace(simulated[0]))["traceEvents"]
        assert any("memory" in event["name"] for event in events) is has_memory
