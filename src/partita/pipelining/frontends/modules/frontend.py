"""Cutting a model between its own submodules without capturing it: ``pipeline(frontend="modules")``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from partita.capture import Modes
from partita.capture.one_thread_at_a_time import one_thread_at_a_time
from partita.capture.proving.proof import Prove, tolerance_of
from partita.errors import ArgumentError, InfeasiblePlan
from partita.listing import listed
from partita.pipelining.blocks.memos import discover_memos
from partita.pipelining.frontends.cuts.cuts import Place, SplitPoint, place_of
from partita.pipelining.frontends.cuts.plan_request import PlanRequest
from partita.pipelining.frontends.cuts.plans import planned_cuts, planned_units
from partita.pipelining.frontends.cuts.recompute_option import Recompute, RecomputeOption, recompute_option
from partita.pipelining.frontends.modules.borders import CallEdge, plan_blocks
from partita.pipelining.frontends.modules.borders import Place as BlockPlace
from partita.pipelining.frontends.modules.costs import Example, block_costs, unit_places
from partita.pipelining.frontends.modules.pipe import ModulePipe
from partita.pipelining.frontends.modules.proof import block_proof
from partita.pipelining.frontends.modules.recording import RecordedPass, record
from partita.pipelining.interface.loss import LossSpec
from partita.pipelining.measuring.link_times import links_between
from partita.planning import Plan

__all__ = ["cut_modules"]

_ATTEMPTS = 8
"""How often the example is run at most, until no module is left out by chance (stochastic depth)."""


def cut_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    where: Mapping[Place, Sequence[SplitPoint]] | PlanRequest,
    loss_spec: LossSpec | None,
    modes: Modes = "both",
    prove: Prove = True,
    recompute: Recompute | None = None,
) -> ModulePipe:
    """Cut ``model`` where its ``forward`` calls these submodules.

    All of the model's code runs unchanged, each part on its stage: the blocks, and what is before, between
    and after them. The example is run on a copy of the model, once in training and twice in evaluation (with
    and without gradients).

    Args:
        where: the sides of each module to cut at, which are there, or what to plan the cuts from.
        prove: see `pipeline`.
        recompute: see `pipeline`; stages as a whole.

    Raises:
        ArgumentError: parts of stages are to be recomputed.
        AssignmentError: a submodule is not called.
        CaptureError: stages would have to share buffers; the model can't be copied; or the stages together do
            not do what the model does, call after call.
    """
    plan = None
    with discover_memos():
        if isinstance(where, PlanRequest):
            plan, places = _planned(
                model, (args, kwargs), lambda: _passes(model, args, kwargs, modes)[0], where
            )
        else:
            places = _places(where, model)
        again = _whole_stages(recompute_option(recompute, plan))
        watch = {path for (path, _), _ in places}
        recordings = _passes(model, args, kwargs, modes, watch)
    block_plan = plan_blocks(model, recordings, places)
    pipe = ModulePipe(model, block_plan, recordings[0].output, plan)
    tolerance = tolerance_of(prove)
    if tolerance is not None:
        proof = block_proof(pipe, model, args, kwargs, {one.training for one in recordings}, tolerance)
    if loss_spec is not None:
        pipe = ModulePipe(model, block_plan, recordings[0].output, plan, loss_spec)
    if tolerance is not None:
        pipe.proof = proof
    pipe.recompute = again.whole_stages(pipe.num_stages)
    pipe.cut_with(args, kwargs)
    return pipe


@one_thread_at_a_time()
def _passes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modes: Modes,
    watch: Collection[str] | None = None,
) -> list[RecordedPass]:
    """Run the example in training, and in evaluation without and with gradients; again with other random
    numbers where a watched module was not called. Without ``watch`` once only.
    """
    settings = [] if modes == "eval" else [(True, True)]  # (training, grad)
    settings += [] if modes == "train" else [(False, False), (False, True)]
    if watch is None:
        training, grad = settings[0]
        return [record(model, args, kwargs, training=training, grad=grad)]
    recordings: list[RecordedPass] = []
    for seed in range(_ATTEMPTS):
        for training, grad in settings:
            recordings.append(
                record(model, args, kwargs, training=training, grad=grad, watch=watch, seed=seed)
            )
        if all(one.calls(path) for one in recordings[: len(settings)] for path in watch):
            break
    return recordings


def _places(
    points: Mapping[Place, Sequence[SplitPoint]], model: nn.Module
) -> list[tuple[BlockPlace, CallEdge]]:
    """The sides of calls to cut at. A submodule with several names gets the one that its calls are recorded
    under.
    """
    names = {id(module): path for path, module in model.named_modules()}
    places: list[tuple[BlockPlace, CallEdge]] = []
    for place, kinds in points.items():
        path, call = place_of(place)
        path = names[id(model.get_submodule(path))]
        for kind in kinds:
            edge = CallEdge.BEFORE if SplitPoint(kind) is SplitPoint.BEGINNING else CallEdge.AFTER
            if ((path, call), edge) not in places:
                places.append(((path, call), edge))
    return places


def _planned(
    model: nn.Module, example: Example, run: Callable[[], RecordedPass], request: PlanRequest
) -> tuple[Plan, list[tuple[BlockPlace, CallEdge]]]:
    """The plan, made here where there is none yet, and its cuts.

    Args:
        run: records a pass of the example.
    """
    plan, recording = request.ready, run()
    # as large units as the wanted stages allow; of a plan, those that it was made of
    counts = [request.least_units] if plan is None else [None, len(plan.stages), 2 * plan.ranks]
    for count in counts:
        names, events = unit_places(model, recording, count)
        if plan is not None and names == planned_units(plan):
            break
    if plan is None:
        _check_places(model, recording, request.stages or 0, len(names))
        request.check_units(len(names))
        plan = request.planned(
            lambda: block_costs(model, example, run(), count)[0],
            links_between(model.parameters()),
            whole_stages=True,
        )
    cuts = planned_cuts(plan, names, range(len(events)))
    return plan, [
        ((path, call), CallEdge.AFTER if ends else CallEdge.BEFORE)
        for path, call, ends in map(events.__getitem__, cuts)
    ]


def _check_places(model: nn.Module, recording: RecordedPass, stages: int, most: int) -> None:
    """Raise InfeasiblePlan where what must lie in one stage leaves too few places to cut at."""
    if stages <= most:
        return
    name = type(model).__name__
    few = f"{stages} stages were asked for, but {name} can be cut into at most {most}: no cut lies"
    if recording.enclosed:
        paths = {path for path, _, _ in recording.enclosed}
        outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
        kinds = {
            "torch.utils.checkpoint": recording.checkpointed,
            "a transform of torch.func": recording.transformed,
            "a torch.autograd.Function": recording.functions,
        }
        around = " or ".join(kind for kind, calls in kinds.items() if calls)
        raise InfeasiblePlan(
            f"{few} within {around}, which must lie in one stage, and the model calls "
            f"{listed(sorted(outer))} there. Let modules call it themselves, around what they hold, or ask "
            f"for {most}"
        )
    owners = {name.rpartition(".")[0] for name in recording.written_spans()}
    repeated = [owner for owner in sorted(owners) if len(recording.calls(owner)) > 1]
    if repeated:
        raise InfeasiblePlan(
            f"{few} between two calls of a module that writes to its buffers, which one stage must have, and "
            f"the model calls {listed(repeated)} more than once. Ask for {most}, or call them once, with all "
            "samples in one batch, where that is what you mean"
        )


def _whole_stages(again: RecomputeOption) -> RecomputeOption:
    parts = listed([*again.modules, *again.units])
    if parts:
        raise ArgumentError(
            f'frontend="modules" recomputes stages as a whole, not parts of them ({parts}): name stages by '
            "their index, or let the model call torch.utils.checkpoint"
        )
    return again
