"""What ``partita plan`` is asked for, before a model is made."""

from __future__ import annotations

import pytest
import torch

from partita.cli.models.model_source import ModelSource
from partita.cli.models.user_file import Built
from partita.cli.options import plan_options
from partita.cli.options.machines import Machines
from partita.cli.options.plan_options import (
    PlanOptions,
    device_names,
    measure_costs,
    plan_schedules,
)
from partita.errors import ScheduleError, UsageError
from partita.planning import Cluster


def test_one_more_rank_is_like_the_last_and_has_as_many_stages() -> None:
    cluster = Cluster(2, speeds=(1.0, 2.0), memories=(10, 20))
    more = PlanOptions(cluster, 4, stages=4).with_one_more_rank()
    assert more.cluster == Cluster(3, speeds=(1.0, 2.0, 2.0), memories=(10, 20, 20))
    assert more.stages == 6
    big, _ = Machines("16xH100", nodes=2).cluster()
    assert PlanOptions(big, 4).with_one_more_rank().cluster.ranks == 17


def test_auto_leaves_stages_and_schedule_open() -> None:
    options = PlanOptions.from_options(Cluster(2), 4, "auto", "AUTO", 4.0, True)
    assert (options.stages, options.schedules) == (None, None)
    named = PlanOptions.from_options(Cluster(2), 4, "4", "vhalf", 4.0, False)
    assert (named.stages, named.schedules, named.recompute) == (4, ("VHalf",), False)


def test_orders_made_for_the_costs_have_a_name_too() -> None:
    assert plan_schedules("listschedule,GPIPE") == ("GPipe", "ListSchedule")
    with pytest.raises(ScheduleError, match="there is no schedule 'x'"):
        plan_schedules("x,ListSchedule")
    with pytest.raises(UsageError, match="--schedule is ''"):
        plan_schedules(",")


def test_completion_knows_the_devices() -> None:
    assert {"H100", "A100", "CPU"} <= {*device_names()}


@pytest.mark.parametrize(("ranks", "given", "threads"), [(2, None, 1), (2, "2", 2), (1, None, 2)])
def test_ranks_that_share_this_machine_are_measured_with_a_thread_each(
    monkeypatch: pytest.MonkeyPatch, ranks: int, given: str | None, threads: int
) -> None:
    measured: list[int] = []
    monkeypatch.setattr(
        plan_options, "measure_units", lambda *_, **__: measured.append(torch.get_num_threads())
    )
    monkeypatch.setattr(ModelSource, "build", lambda *_: Built(torch.nn.Linear(2, 2), (torch.ones(1, 2),)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure_costs(ModelSource("x"), None, ranks, None, lambda _: None)
        assert (measured, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)
