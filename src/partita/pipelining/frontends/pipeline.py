"""`pipeline`, which cuts a model into a `Pipe`, and the measurements and reference graph for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.tensors.storage import has_memory
from partita.capture import Captured, Modes, capture
from partita.capture.modes import captured_mode, captures_training, copy_flags, drop_mode_check
from partita.capture.proof import Prove
from partita.errors import ArgumentError, InfeasiblePlan, NotProven
from partita.graph.cost import NodeCost, estimate, measure
from partita.graph.effects import analyse
from partita.listing import listed
from partita.pipelining.frontends.cuts.annotations import split_points
from partita.pipelining.frontends.cuts.cuts import (
    Place,
    SplitPoint,
    cuts_at_annotations,
    cuts_at_marks,
    cuts_at_points,
    stage_assignment,
)
from partita.pipelining.frontends.cuts.plans import planned_cuts, planned_units
from partita.pipelining.frontends.graph.branches import repeat_branches
from partita.pipelining.frontends.graph.costs import cost_model, cost_models
from partita.pipelining.frontends.graph.coverage import check_state
from partita.pipelining.frontends.graph.multi_use import (
    MultiUseParameterConfig,
    MultiUseParamSpec,
    transmit_parameters,
)
from partita.pipelining.frontends.graph.other_mode import check_shared_buffers, matched_assignment
from partita.pipelining.frontends.graph.pipe import GraphPipe
from partita.pipelining.frontends.graph.writes import check_writes
from partita.pipelining.frontends.modules.frontend import ByPlan, cut_modules
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.interface.loss import LossSpec
from partita.pipelining.interface.two_modes import ModeCut, TwoModes
from partita.planning import Cluster, CostModel, Plan
from partita.runtime import key_random_nodes
from partita.splitter import Split, split

__all__ = ["keyed_graph", "measure_units", "pipeline"]

SplitPolicy = Callable[[GraphModule], GraphModule]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[Place, SplitPoint] | None = None,
    split_policy: SplitPolicy | None = None,
    *,
    stages: int | None = None,
    plan: Plan | None = None,
    cluster: Cluster | None = None,
    schedule: str = "1F1B",
    microbatches: int = 8,
    loss_spec: LossSpec | None = None,
    multi_use_param_spec: MultiUseParamSpec = MultiUseParameterConfig.REPLICATE,
    dynamic_shapes: Any = None,
    modes: Modes = "both",
    frontend: Literal["export", "modules"] = "export",
    prove: Prove = True,
) -> Pipe:
    """Cut a model into pipeline stages. The model is not changed and can be cut again.

    The cuts come from exactly one of: ``split_spec``; `annotate_split_points`; `pipe_split` marks in the
    model's ``forward``, or put into the captured graph by ``split_policy``; ``stages`` (that many stages,
    planned for the smallest bottleneck from costs measured now); ``plan`` (made before with `measure_units`
    and `plan_stages`). A cut with no operation on one side of it does not count.

    Args:
        module: the model. Captured in training and in evaluation mode; the pipe follows ``train()`` and
            ``eval()``.
        mb_args: example arguments, with the shapes of one microbatch.
        mb_kwargs: example keyword arguments.
        split_spec: from qualified module name to `SplitPoint`. Where a module is called several times,
            ``"block@1"`` or ``("block", 1)`` is its second call.
        split_policy: takes the captured graph module and returns it with `pipe_split` marks in it.
        stages: how many stages to plan for, from costs measured now; for a model on the meta device, from
            the operations and bytes of its operators. Where ``torch.distributed`` is initialised this is
            collective over the default group: rank 0's plan is used by all.
        plan: the plan to cut by.
        cluster: the links and memory that are planned for.
        schedule: the schedule that is planned for.
        microbatches: the number of microbatches that is planned for.
        loss_spec: a tree like the model's output with True at the loss, where the model returns it: then a
            call of the pipe runs the backward pass too, and schedules need no ``loss_fn``. Without it a call
            of the pipe does what the model does, and schedules without a ``loss_fn`` take what the model's
            output, if it is a dict, holds under ``"loss"``.
        multi_use_param_spec: what happens to parameters that several stages use, for all or by name.
        dynamic_shapes: which sizes stay open, as ``torch.export`` has it, over the arguments of the model.
            None: the batch size, if the model allows it (otherwise ``info()`` says why not); False: none.
        modes: ``"train"`` or ``"eval"`` to capture one mode only. Of a model that takes another path in each
            mode both are captured, and its stages run that of their mode; the cuts of the second follow those
            of the first.
        frontend: ``"export"`` captures the model; ``"modules"`` runs the model's own code on every stage and
            cuts between calls of its submodules: for models that can't be captured, because they read values
            of tensors, draw random numbers in Python or change lists of their own.
        prove: whether to run the captured graph and the model itself on the example and on other samples of
            its kind (other values and masks, another batch size where it is open), and compare outputs,
            gradients, buffers and random numbers. True compares bit for bit; ``"close"`` or a ``Tolerance``
            accepts a difference; False compares nothing. ``Pipe.proof`` says what was compared. Where that is
            not possible (on the meta device, or for lack of memory), a `NotProven` warning says so.

    Raises:
        ArgumentError: no source of the cuts was given, or more than one.
        CaptureError: the model can't be captured, the captured graph computes something else than the model,
            or the cut goes through memory that the model writes to.
        InfeasiblePlan: there are more stages than the model can be cut into.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"1": SplitPoint.END})
    >>> pipe.num_stages, list(pipe.get_stage_module(1).state_dict())
    (2, ['2.weight', '2.bias'])
    """
    sources = {"split_spec": split_spec, "split_policy": split_policy, "stages": stages, "plan": plan}
    named = [name for name, value in sources.items() if value is not None]
    if len(named) > 1:
        raise ArgumentError(f"pipeline got {' and '.join(named)}: give one of them, each says where to cut")
    by_plan = ByPlan(stages, plan, cluster, schedule, microbatches)
    if frontend == "modules":
        others = {
            "multi_use_param_spec": multi_use_param_spec is not MultiUseParameterConfig.REPLICATE,
            "dynamic_shapes": dynamic_shapes is not None,
            "split_policy": split_policy is not None,
        }
        where = _module_cuts(module, split_spec, by_plan, [name for name, used in others.items() if used])
        return cut_modules(module, mb_args, mb_kwargs or {}, where, loss_spec, modes, prove)
    if frontend != "export":
        raise ArgumentError(f"frontend is {frontend!r}: choose 'export' or 'modules'")
    # Capture the model, in both modes where it takes another path in each.
    captured, evaluation = _by_mode(
        capture(module, mb_args, mb_kwargs, dynamic_shapes=dynamic_shapes, modes=modes, prove=prove)
    )
    if not captured.proof.holds and prove is not False:
        warnings.warn(f"{type(module).__name__} is cut, but {captured.proof}", NotProven, stacklevel=2)
    # Find the cuts in the first graph.
    whole = captured.module if split_policy is None else split_policy(captured.module)
    cuts = cuts_at_marks(whole)
    annotations = split_points(module)
    _check_sources(named, cuts, list(annotations))
    if annotations:
        cuts = cuts_at_annotations(whole, module, annotations)
    elif split_spec is not None:
        cuts = cuts_at_points(whole, module, split_spec)
    elif stages is not None or plan is not None:
        flat = captured.signature.flatten(mb_args, mb_kwargs or {})
        plan, cuts = _planned(whole, flat, by_plan)
    assignment = stage_assignment(whole, cuts)
    # The cuts of the second graph follow from those of the first, before that one is changed.
    other = None
    if evaluation is not None:
        other = _cut_like(evaluation, whole, assignment, multi_use_param_spec)
    repeat_branches(whole, assignment)
    transmit_parameters(whole, assignment, multi_use_param_spec)
    pipe = GraphPipe(
        whole, _cut(whole, assignment), captured.signature, plan, loss_spec, other, proof=captured.proof
    )
    if other is not None or captured_mode(whole) is not None:
        _follow_flags(module, pipe)
    check_state(module, [pipe.get_stage_module(index) for index in range(pipe.num_stages)])
    return pipe


def _planned(whole: GraphModule, flat: Sequence[Any], by_plan: ByPlan) -> tuple[Plan, list[int]]:
    """The plan, made here where there is none yet, and its cuts."""
    costs, ends = _units(whole, flat, by_plan.stages, by_plan.plan)
    plan = by_plan.plan or by_plan.make(costs)
    return plan, planned_cuts(plan, costs, ends)


def _cut_like(
    evaluation: Captured, whole: GraphModule, assignment: Mapping[str, int], spec: MultiUseParamSpec
) -> ModeCut:
    """Cut the graph of evaluation where ``whole``, that of training, is cut."""
    graph = evaluation.module
    cuts_at_marks(graph)
    matched = matched_assignment(whole, assignment, graph)
    check_shared_buffers(whole, assignment, graph, matched)
    repeat_branches(graph, matched)
    transmit_parameters(graph, matched, spec)
    return ModeCut(graph, _cut(graph, matched), evaluation.signature)


def _by_mode(captured: Captured) -> tuple[Captured, Captured | None]:
    """The graph that is cut first, and that of evaluation where it is another one.

    A graph that was captured for one mode only is put into that mode.
    """
    if captured.other is None:
        only = captured_mode(captured.module)
        if only is not None:
            captured.module.train(only)
        return captured, None
    train, evaluation = captured, captured.other
    if not captures_training(train.module):
        train, evaluation = replace(evaluation, proof=captured.proof), train
    for graph, training in ((train.module, True), (evaluation.module, False)):
        drop_mode_check(graph)
        graph.train(training)
    return train, evaluation


def _follow_flags(model: nn.Module, pipe: GraphPipe) -> None:
    """Give a pipe, and each of its modules, the training flags of the model."""
    pipe.train(model.training)
    for index in range(pipe.num_stages):
        copy_flags(model, pipe.get_stage_module(index))
    copy_flags(model, pipe.whole)


def _module_cuts(
    module: nn.Module, split_spec: Mapping[Place, SplitPoint] | None, by_plan: ByPlan, others: list[str]
) -> Mapping[Place, Sequence[SplitPoint]] | ByPlan:
    """The split points of ``frontend="modules"``, or what to plan the cuts from."""
    if others:
        raise ArgumentError(
            f'frontend="modules" does not take {others[0]}: it runs the model\'s own code and has no graph; '
            "give stages=N, a split_spec, or annotate_split_points"
        )
    annotations = split_points(module)
    sources = {"split_spec": split_spec, "stages": by_plan.stages, "plan": by_plan.plan}
    named = [name for name, value in sources.items() if value is not None]
    _check_sources(named, [], list(annotations))
    if annotations:
        return dict(annotations.items())
    if split_spec is None:
        return by_plan
    return {place: (point,) for place, point in split_spec.items()}


def _check_sources(named: list[str], marks: list[int], annotated: list[str]) -> None:
    if not named and not marks and not annotated:
        raise ArgumentError(
            "pipeline does not know where to cut: give stages=N, a split_spec, a split_policy or a plan, "
            "annotate_split_points, or call pipe_split() in the model's forward"
        )
    if annotated and (named or marks):
        other = f"pipeline got {named[0]}" if named else "its forward calls pipe_split()"
        raise ArgumentError(
            f"the model is annotated with split points at {listed(annotated)} and {other}: use one of the "
            "two (clear_split_points(model) takes the annotations off)"
        )
    if named == ["split_policy"] and not marks:
        raise ArgumentError(
            "the split_policy returned a graph without pipe_split marks: put one where a stage ends"
        )
    if marks and named not in ([], ["split_policy"]):
        raise ArgumentError(f"the model calls pipe_split() and pipeline got {named[0]}: use one of the two")


def measure_units(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 3,
    progress: Callable[[float], None] | None = None,
    dynamic_shapes: Any = None,
) -> CostModel:
    """Return the costs of a model's units on this machine, for `plan_stages`. For a model on the meta device,
    seconds are estimated (see ``partita.graph.cost.estimate``) and good for ratios only.

    Args:
        repeats: every operation's time is the fastest of so many runs.
        progress: called with the share of the work that is done, from 0.0 to 1.0.
        dynamic_shapes: as for `pipeline`.
    """
    captured, _ = _by_mode(capture(module, mb_args, mb_kwargs, dynamic_shapes=dynamic_shapes))
    flat = captured.signature.flatten(mb_args, mb_kwargs or {})
    return cost_model(captured.module, _costs(captured.module, flat, repeats=repeats, progress=progress))[0]


def _costs(whole: GraphModule, flat: Sequence[Any], **options: Any) -> list[NodeCost]:
    """Measured, or estimated where the model has no memory."""
    tensors = (*whole.parameters(), *whole.buffers(), *flat)
    if all(has_memory(tensor) for tensor in tensors if isinstance(tensor, Tensor)):
        return measure(whole, flat, **options)
    return estimate(whole, flat)


def _units(
    whole: GraphModule, flat: Sequence[Any], stages: int | None, plan: Plan | None
) -> tuple[CostModel, list[int]]:
    """The units to plan with, as large as ``stages`` allows; for a plan, those that it was made of."""
    tried = []
    for costs, ends in cost_models(whole, _costs(whole, flat)):
        tried.append((costs, ends))
        fits = stages is not None and len(costs.units) >= stages
        if fits or (plan is not None and planned_units(plan) == [unit.name for unit in costs.units]):
            return costs, ends
    return tried[0 if stages is None else -1]  # planning refuses these, and says how many units there are


def keyed_graph(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    prove: Prove = True,
) -> GraphModule | TwoModes:
    """Return the uncut model as a graph whose random numbers follow the pipeline's rule (see
    ``partita.runtime.rng``). It holds the model's own parameters.

    Run with `UncutReference` it computes what a pipeline of any number of stages computes.
    """
    captured = capture(module, mb_args, mb_kwargs, dynamic_shapes=dynamic_shapes, prove=prove)
    first, evaluation = _by_mode(captured)
    graphs = [first.module] if evaluation is None else [first.module, evaluation.module]
    for graph in graphs:
        cuts_at_marks(graph)
        _key(graph)
    if evaluation is None:
        return first.module
    whole = TwoModes(graphs[0], graphs[1], {True: first.signature, False: evaluation.signature})
    copy_flags(module, whole)
    return whole


def _key(whole: GraphModule) -> None:
    effects = analyse(whole)
    random = {effects.nodes[position] for position in effects.random}
    key_random_nodes(whole, random.__contains__)


def _cut(whole: GraphModule, assignment: dict[str, int]) -> Split:
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
    return cut
