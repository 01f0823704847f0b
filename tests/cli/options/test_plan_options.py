"""What ``partita plan`` is asked for, before a model is made."""

from __future__ import annotations

import pytest

from partita.cli.options.machines import Machines
from partita.cli.options.plan_options import (
    PlanOptions,
    device_names,
    plan_schedules,
)
from partita.errors import ScheduleError, UsageError
from partita.planning import Cluster, devices


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
    everything = plan_schedules("auto,1F1B")
    assert {"1F1B", "VMin", "ListSchedule"} < set(everything)
    assert set(plan_schedules("ForwardOnly,ALL")) == {*everything, "ForwardOnly"}
    with pytest.raises(ScheduleError, match="there is no schedule 'x'"):
        plan_schedules("x,ListSchedule")
    with pytest.raises(UsageError, match="--schedule is ''"):
        plan_schedules(",")


def test_completion_knows_the_devices() -> None:
    assert {"H100", "A100", "CPU"} <= {*device_names()}


def test_devices_that_differ_are_compared_by_the_dtype_of_the_model() -> None:
    machines = Machines("1xH100,1xMI300X")
    options = PlanOptions(machines.cluster()[0], 4, machines=machines)
    by_dtype = {name: options.in_dtype(name).cluster.speed(1) for name in ("bfloat16", "float32")}
    speeds = [devices()[name] for name in ("H100", "MI300X")]
    expected = {name: speeds[1].flops(name) / speeds[0].flops(name) for name in by_dtype}
    assert by_dtype == pytest.approx(expected)
    assert by_dtype["float32"] > 1.5 * by_dtype["bfloat16"]
