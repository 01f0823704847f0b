"""``pipeline``: from a model to a `Pipe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from partita._torch.export import Signature
from partita.capture import capture
from partita.errors import InfeasiblePlan, PlanError
from partita.graph.cost import measure
from partita.graph.effects import analyse
from partita.pipelining.costs import cost_model
from partita.pipelining.cuts import SplitPoint, cuts_at_marks, cuts_at_points, stage_assignment
from partita.pipelining.pipe import Pipe
from partita.pipelining.writes import check_writes
from partita.planning import Cluster, CostModel, Plan, plan_stages
from partita.runtime import key_random_nodes
from partita.splitter import split

__all__ = ["keyed_graph", "measure_units", "pipeline"]

SplitPolicy = Callable[[GraphModule], GraphModule]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    stages: int | None = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    schedule: str = "1F1B",
    microbatches: int = 8,
) -> Pipe:
    """Cut a model into pipeline stages. The model is not changed and can be cut again.

    The cuts come from exactly one of: ``split_spec``; `pipe_split` marks in the model's ``forward``, or put
    into the captured graph by ``split_policy``; ``stages`` (so many, planned for the smallest bottleneck from
    costs measured here and now); ``plan`` (made before with `measure_units` and `plan_stages`).

    Args:
        module: the model. Captured in training and in evaluation mode; the pipe follows ``train()`` and
            ``eval()``.
        mb_args: example arguments of the size of one microbatch.
        mb_kwargs: example keyword arguments.
        split_spec: from qualified module name to `SplitPoint`.
        split_policy: takes the captured graph module and returns it with `pipe_split` marks in it.
        stages: how many stages to plan for. Where ``torch.distributed`` is initialised this is collective
            over the default group: rank 0's plan is used by all.
        plan: cut as this plan says.
        cluster: links and memory that the planner should count with.
        schedule: the schedule that the planner should count with.
        microbatches: how many the planner should count with.

    Raises:
        ValueError: no way to find the cuts was given, or more than one.
        CaptureError: the model can't be captured, or the cut goes through memory that the model writes to.
        InfeasiblePlan: more stages than the model can be cut into.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"1": SplitPoint.END})
    >>> pipe.num_stages, list(pipe.get_stage_module(1).state_dict())
    (2, ['2.weight', '2.bias'])
    """
    ways = {"split_spec": split_spec, "split_policy": split_policy, "stages": stages, "plan": plan}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"pipeline got {' and '.join(given)}: give one of them, each says where to cut")
    captured = capture(module, mb_args, mb_kwargs)
    whole = captured.module if split_policy is None else split_policy(captured.module)
    marks = cuts_at_marks(whole)
    _check_ways(given, marks)
    if split_spec is not None:
        cuts = cuts_at_points(whole, module, split_spec)
    elif stages is not None or plan is not None:
        flat = captured.signature.flatten(mb_args, mb_kwargs or {})
        costs, ends = cost_model(whole, measure(whole, flat))
        if plan is None:
            assert stages is not None
            planned = plan_stages(
                costs, stages, cluster=cluster, schedule=schedule, microbatches=microbatches
            )
            plan = _same_on_all_ranks(planned)
        cuts = _plan_cuts(plan, costs, ends)
    else:
        cuts = marks
    return _build(whole, stage_assignment(whole, cuts), captured.signature, plan)


def _check_ways(given: list[str], marks: list[int]) -> None:
    if not given and not marks:
        raise ValueError(
            "pipeline does not know where to cut: give stages=N, a split_spec, a split_policy or a plan, or "
            "call pipe_split() in the model's forward"
        )
    if given == ["split_policy"] and not marks:
        raise ValueError(
            "the split_policy returned a graph without pipe_split marks: put one where a stage ends"
        )
    if marks and given not in ([], ["split_policy"]):
        raise ValueError(f"the model calls pipe_split() and pipeline got {given[0]}: use one of the two")


def measure_units(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 3,
    progress: Callable[[float], None] | None = None,
) -> CostModel:
    """What the parts of a model cost on this machine: what `plan_stages` plans with.

    Args:
        repeats: every operation's time is the fastest of so many runs.
        progress: told the share of the work that is done, from 0.0 to 1.0.
    """
    captured = capture(module, mb_args, mb_kwargs)
    flat = captured.signature.flatten(mb_args, mb_kwargs or {})
    return cost_model(captured.module, measure(captured.module, flat, repeats=repeats, progress=progress))[0]


def _same_on_all_ranks(plan: Plan) -> Plan:
    """Rank 0's plan, since every rank measures other times and a cut must be the same everywhere."""
    if not dist.is_available() or not dist.is_initialized():
        return plan
    texts = [plan.to_json()]
    dist.broadcast_object_list(texts, src=0)
    return Plan.from_json(texts[0])


def _plan_cuts(plan: Plan, costs: CostModel, ends: list[int]) -> list[int]:
    planned = [name for stage in plan.stages for name in stage.units]
    found = [unit.name for unit in costs.units]
    if planned != found:
        missing = next(
            (name for name, other in zip(planned, found, strict=False) if name != other), "its length"
        )
        raise PlanError(
            f"the plan was made for another model or other shapes: it has {len(planned)} units, this model "
            f"{len(found)}, and they first differ at {missing!r}; measure and plan again"
        )
    return [ends[stage.last_unit] for stage in plan.stages[:-1]]


def keyed_graph(
    module: nn.Module, mb_args: tuple[Any, ...], mb_kwargs: Mapping[str, Any] | None = None
) -> GraphModule:
    """The uncut model as a graph whose random numbers follow the pipeline's rule (see
    ``partita.runtime.rng``).

    It holds the model's own parameters. Run it with `UncutReference` to get what a pipeline of any number of
    stages computes.
    """
    whole = capture(module, mb_args, mb_kwargs).module
    cuts_at_marks(whole)
    _key(whole)
    return whole


def _key(whole: GraphModule) -> None:
    effects = analyse(whole)
    random = {effects.nodes[position] for position in effects.random}
    key_random_nodes(whole, random.__contains__)


def _build(whole: GraphModule, assignment: dict[str, int], signature: Signature, plan: Plan | None) -> Pipe:
    check_writes(whole, assignment)
    _key(whole)
    for node in whole.graph.nodes:
        if node.name not in assignment and node.op.startswith("call_"):
            # a seeding node goes with the random node behind it
            assignment[node.name] = assignment[node.next.name]
    stages = max(assignment.values()) + 1
    cut = split(whole, {name: f"pp_{stage}" for name, stage in assignment.items()})
    if [piece.key for piece in cut.pieces] != [f"pp_{stage}" for stage in range(stages)]:
        raise InfeasiblePlan(
            f"the cuts ask for {stages} stages, but {len(cut.pieces)} have anything to compute: some hold "
            "nothing but switches of a grad or autocast region; move the cut"
        )
    return Pipe(whole, cut, signature, plan)
