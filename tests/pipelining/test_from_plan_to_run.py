"""From a model to a running pipeline in two calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.pipelining.models import PLAIN, TRANSFORMER, Case
from tests.pipelining.running import Record, assert_same, train, uncut
from tests.runtime.worlds import endings, patience

from partita.errors import ArgumentError, InfeasiblePlan, PlanError
from partita.pipelining import Pipe, SplitPoint, pipeline
from partita.planning import Action, Cluster, CostModel, Plan, Schedule, Unit, plan_stages
from partita.planning.generators.plan_schedule import schedule_of
from partita.runtime import Comm, InProcessWorld

CASE = TRANSFORMER


def cut(case: Case = CASE, **options: Any) -> Pipe:
    args, kwargs, _ = case.data(2)
    return pipeline(case.model(), args, kwargs, prove=False, **options)


@cache
def plan(case: Case = CASE, schedule: str | None = None) -> Plan:
    made = cut(case, plan="auto", cluster=Cluster(2), microbatches=4, schedule=schedule).plan
    assert made is not None
    return made


def recomputing(one: Plan) -> Plan:
    """The first stage as a whole, and of each other one its first unit."""
    stages = []
    for stage in one.stages:
        last = stage.first_unit if stage.index else stage.last_unit
        stages.append(replace(stage, recompute=((stage.first_unit, last),)))
    return replace(one, stages=tuple(stages))


def run(pipe: Pipe) -> list[Record]:
    def body(comm: Comm) -> Record:
        schedule, record = copy.deepcopy(pipe).schedule(CASE.loss, comm=comm), Record()
        train(schedule, [stage.module for stage in schedule.stages.values()], CASE, record)
        return record

    assert pipe.plan is not None
    return InProcessWorld(pipe.plan.ranks).run(body)


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "ZBVZeroBubble"}, {"memory_limit": "1MB"}, {"cluster": Cluster(1)}],
    ids=["any", "a V", "a limit", "one rank"],
)
def test_a_model_is_cut_placed_and_run_by_a_search(options: dict[str, Any]) -> None:
    pipe = cut(**({"plan": "auto", "cluster": Cluster(2), "microbatches": 4} | options))
    assert pipe.plan is not None
    assert pipe.plan.microbatches == 4
    assert pipe.plan.schedule == options.get("schedule", pipe.plan.schedule)
    assert_same(run(pipe), uncut(CASE))


@pytest.mark.parametrize(
    "how", [{"plan": "auto", "cluster": Cluster(2)}, {"stages": 3}], ids=["auto", "stages"]
)
def test_one_sum_of_tied_gradients_can_be_planned_for(how: dict[str, Any]) -> None:
    """The advice of an error ("with one sum a step it would fit") had no option to follow it by."""
    pipe = cut(**how, tied_gradients="reduced")
    assert pipe.plan is not None
    assert pipe.plan.tied_gradients == "reduced"


def test_a_plan_says_what_becomes_of_tied_gradients_and_an_option_overrules_it() -> None:
    """Planned with ``--tied-gradients reduced``, the step sent them with each microbatch all the same."""
    pipe = cut(plan=Plan.from_json(replace(plan(schedule="1F1B"), tied_gradients="reduced").to_json()))
    assert pipe.routes.tied

    def body(comm: Comm) -> tuple[str, str]:
        own = copy.deepcopy(pipe)
        planned = own.schedule(CASE.loss, comm=comm)
        return planned.tied_gradients, own.schedule(
            CASE.loss, comm=comm, tied_gradients="exact"
        ).tied_gradients

    assert InProcessWorld(2).run(body) == [("reduced", "exact")] * 2


def test_a_plan_says_what_is_recomputed_and_an_argument_overrules_it() -> None:
    again = Plan.from_json(recomputing(plan(schedule="1F1B")).to_json())
    pipe = cut(plan=again)
    assert 0 in pipe.recompute
    assert_same(run(pipe), uncut(CASE))
    assert not cut(plan=again, recompute=False).recompute


def test_a_plan_with_an_order_of_its_own_needs_no_named_schedule() -> None:
    one = plan(schedule="GPipe")
    order = schedule_of(one)
    rows = tuple(tuple(reversed_backwards(row)) for row in order.rows)
    own = replace(one, schedule="mine", order=Schedule("mine", one.placement, 4, rows))
    assert_same(run(cut(plan=own)), uncut(CASE))


def reversed_backwards(row: tuple[Action | None, ...]) -> list[Action]:
    """B is split; all of W comes last."""
    halves = []
    for action in filter(None, row):
        text = str(action)
        halves += [text] if "B" not in text else [text.replace("B", "I")]
    halves += [text.replace("I", "W") for text in halves if "I" in text]
    return [Action.parse(text) for text in halves]


def test_the_models_own_code_is_planned_too() -> None:
    args, kwargs, _ = CASE.data(2)
    options: dict[str, Any] = {"frontend": "modules", "prove": False}
    auto = {"plan": "auto", "cluster": Cluster(2), "microbatches": 4, "schedule": "Interleaved1F1B"}
    pipe = pipeline(CASE.model(), args, kwargs, **auto, **options)
    assert pipe.plan is not None
    again = pipeline(CASE.model(), args, kwargs, plan=pipe.plan, **options)
    assert again.num_stages == pipe.num_stages == len(pipe.plan.stages)
    part = next(stage for stage in pipe.plan.stages if len(stage.units) > 1)
    stages = list(pipe.plan.stages)
    stages[part.index] = replace(part, recompute=((part.first_unit, part.first_unit),))
    with pytest.raises(ArgumentError, match="recomputes stages as a whole, not parts of them"):
        pipeline(CASE.model(), args, kwargs, plan=replace(pipe.plan, stages=tuple(stages)), **options)


# --- refused in one line ---


def made_for_others() -> Plan:
    units = tuple(Unit(f"{number}:op", 1.0, 2.0) for number in range(4))
    return plan_stages(CostModel(units, (0, 0, 0)), 2)


def wider() -> Plan:
    one = plan(PLAIN)
    first = replace(one.stages[0], parameters=one.stages[0].parameters * 4)
    return replace(one, stages=(first, *one.stages[1:]))


REFUSED: list[tuple[Callable[[], dict[str, Any]], type[Exception], str]] = [
    (lambda: {"plan": "best"}, ArgumentError, r"plan is 'best': give a Plan .* or 'auto'"),
    (
        lambda: {"stages": 2, "tied_gradients": "both"},
        ArgumentError,
        "tied_gradients is 'both': give exact or",
    ),
    (lambda: {"plan": "auto"}, ArgumentError, r"for how many ranks: initialise torch\.distributed .*Cluster"),
    (lambda: {"plan": "auto", "stages": 2}, ArgumentError, "pipeline got stages and plan: give one"),
    (
        lambda: {"plan": plan(PLAIN), "memory_limit": 1000},
        InfeasiblePlan,
        r"by the plan rank \d holds \d+ bytes, and memory_limit is 1000: plan again",
    ),
    (
        lambda: {"plan": "auto", "cluster": Cluster(2), "memory_limit": "3 apples"},
        PlanError,
        "memory_limit is '3 apples': write it like 80GB",
    ),
    (lambda: {"plan": "auto", "cluster": Cluster(2), "memory_limit": 100}, InfeasiblePlan, "100"),
    (lambda: {"stages": 2, "memory_limit": 100}, InfeasiblePlan, "100 bytes"),
    (lambda: {"plan": made_for_others()}, PlanError, "the plan was made for another model or other shapes"),
    (
        lambda: {"plan": wider()},
        PlanError,
        r"a model with [\d,]+ parameters in stage 0, and this one has \d+ there",
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED, ids=lambda value: "")
def test_what_is_wrong_with_a_plan_is_said(
    options: Callable[[], dict[str, Any]], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as error:
        cut(PLAIN, **options())
    assert "\n" not in str(error.value)


def test_a_plan_for_another_number_of_ranks_is_refused_on_every_rank() -> None:
    pipe = cut(PLAIN, plan=plan(PLAIN))
    errors = []

    def body(comm: Comm) -> None:
        with pytest.raises(PlanError, match="the plan is for 2 ranks and the group has 3: give a group of 2"):
            pipe.schedule(PLAIN.loss, comm=comm)
        errors.append(comm.rank)

    InProcessWorld(3).run(body)
    assert sorted(errors) == [0, 1, 2]
    with pytest.raises(PlanError, match=r"torch\.distributed is not initialised: call init_process_group"):
        pipe.schedule(PLAIN.loss)


@pytest.mark.parametrize("kind", ["1F1B", "GPipe", None])
def test_a_plan_for_another_number_of_microbatches_is_refused(kind: str | None) -> None:
    """It ended in a TypeError: "got multiple values for argument 'n_microbatches'"."""

    def body(comm: Comm) -> None:
        pipe = cut(PLAIN, plan=plan(PLAIN, kind))
        with pytest.raises(PlanError, match="n_microbatches is 8, and the plan is for 4: plan for as many"):
            pipe.schedule(PLAIN.loss, comm=comm, n_microbatches=8)
        assert pipe.schedule(PLAIN.loss, comm=comm, n_microbatches=4).n_microbatches == 4

    InProcessWorld(2).run(body)


def test_a_pipe_that_was_cut_by_hand_has_no_schedule_of_its_own() -> None:
    pipe = pipeline(PLAIN.model(), PLAIN.data(2)[0], split_spec={"a": SplitPoint.END})
    with pytest.raises(PlanError, match="this pipe was cut by hand"):
        pipe.schedule(PLAIN.loss)


# --- processes ---


def _planned_by_all(comm: Comm) -> bytes:
    torch.set_num_threads(1)
    pipe = cut(plan="auto", microbatches=4, memory_limit="1GB")
    assert pipe.plan is not None
    plans = comm.all_gather_object(pipe.plan.to_json())
    assert plans[0] == plans[1]
    schedule, record = pipe.schedule(CASE.loss), Record()
    train(schedule, [stage.module for stage in schedule.stages.values()], CASE, record)
    schedule.close()
    refused = [
        _refusal(plan="auto", memory_limit=100),
        _refusal(plan="auto", cluster=Cluster(3)),
        _refusal(plan=replace(pipe.plan, placement=(*pipe.plan.placement[:-1], 2), order=None)),
    ]
    return pickle.dumps((record, refused))


def _refusal(**options: Any) -> str:
    try:
        pipeline(PLAIN.model(), PLAIN.data(2)[0], prove=False, **options)
    except PlanError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_all_ranks_run_rank_0s_plan_and_refuse_alike() -> None:
    with patience(90.0):  # measures, and searches
        ended = endings(2, _planned_by_all)
    assert not any(ending.error for ending in ended), [ending.text for ending in ended]
    results = [pickle.loads(ending.result) for ending in ended]
    assert_same([record for record, _ in results], uncut(CASE))
    assert results[0][1] == results[1][1]
    infeasible, cluster, too_many = results[0][1]
    assert infeasible.startswith("InfeasiblePlan: ")
    assert "the cluster has 3 ranks and torch.distributed has 2: start 3 processes" in cluster
    assert "the plan is for 3 ranks and torch.distributed has 2: start 3 processes" in too_many
