"""Cutting a model between its own submodules without capturing it: ``pipeline(frontend="modules")``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from partita.capture import Modes
from partita.capture.proof import Prove, tolerance_of
from partita.pipelining.blocks.memos import discover_memos
from partita.pipelining.frontends.cuts.cuts import Place, SplitPoint, find_submodule, place_of
from partita.pipelining.frontends.cuts.plans import planned_cuts, same_on_all_ranks
from partita.pipelining.frontends.modules.borders import CallEdge, plan_blocks
from partita.pipelining.frontends.modules.borders import Place as BlockPlace
from partita.pipelining.frontends.modules.costs import block_costs
from partita.pipelining.frontends.modules.pipe import ModulePipe
from partita.pipelining.frontends.modules.proof import block_proof
from partita.pipelining.frontends.modules.recording import RecordedPass, record
from partita.pipelining.interface.loss import LossSpec
from partita.planning import Cluster, CostModel, Plan, plan_stages

__all__ = ["ByPlan", "cut_modules"]

_ATTEMPTS = 8
"""How often the example is run at most, until no module is left out by chance (stochastic depth)."""


@dataclass(frozen=True)
class ByPlan:
    """Arguments of `pipeline` from which the cuts are planned."""

    stages: int | None
    plan: Plan | None
    cluster: Cluster | None
    schedule: str
    microbatches: int

    def make(self, costs: CostModel) -> Plan:
        """Return a new plan from these costs, the same on all ranks."""
        assert self.stages is not None
        return same_on_all_ranks(
            plan_stages(
                costs,
                self.stages,
                cluster=self.cluster,
                schedule=self.schedule,
                microbatches=self.microbatches,
            )
        )


def cut_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    where: Mapping[Place, Sequence[SplitPoint]] | ByPlan,
    loss_spec: LossSpec | None,
    modes: Modes = "both",
    prove: Prove = True,
) -> ModulePipe:
    """Cut ``model`` where its ``forward`` calls these submodules.

    All of the model's code runs unchanged, each part on its stage: the blocks, and what is before, between
    and after them. The example is run on a copy of the model, once in training and twice in evaluation (with
    and without gradients).

    Args:
        where: the sides of each module to cut at, or what to plan the cuts from.
        prove: see `pipeline`.

    Raises:
        ModuleNameError: there is no submodule of that name.
        AssignmentError: a submodule is not called.
        CaptureError: stages would have to share buffers; the model can't be copied; or the stages together do
            not do what the model does, call after call.
    """
    if not isinstance(where, ByPlan):
        for place in where:
            find_submodule(model, place_of(place)[0])
    plan = None
    with discover_memos():
        if isinstance(where, ByPlan):
            plan, places = _planned(model, _passes(model, args, kwargs, modes)[0], where)
        else:
            places = _places(where, model)
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
    return pipe


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
    model: nn.Module, recording: RecordedPass, where: ByPlan
) -> tuple[Plan, list[tuple[BlockPlace, CallEdge]]]:
    costs, events = block_costs(model, recording, where.stages)
    plan = where.plan or where.make(costs)
    cuts = planned_cuts(plan, costs, range(len(events)))
    return plan, [
        ((path, call), CallEdge.AFTER if ends else CallEdge.BEFORE)
        for path, call, ends in map(events.__getitem__, cuts)
    ]
