"""Two processes of one thread each that train a small model together, for `prediction` and `planner`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.prediction_models import Subject
from benchmarks.ranks import on_ranks
from partita.capture import Captured, capture
from partita.pipelining import pipeline
from partita.pipelining.frontends.graph.units.chosen_units import units_to_plan
from partita.pipelining.frontends.graph.units.costs import cost_model
from partita.pipelining.frontends.graph.units.unit_runs import GraphLoss
from partita.planning import CostModel, Plan, StageCost
from partita.planning.costs.recompute import recomputed_cost
from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.tied_gradients import summed_gradients, tied_messages
from partita.runtime import ProcessGroupComm
from partita.runtime.freed_memory import keep_freed_memory

__all__ = [
    "MICROBATCHES",
    "RANKS",
    "MeasuredModel",
    "Steps",
    "average",
    "on_two_ranks",
    "stage_costs",
]

RANKS = 2
MICROBATCHES = 8
_LIMIT_S = 900.0


def on_two_ranks(body: Callable[..., Any], *args: Any) -> Any:
    """Run ``body(comm, *args)`` on both ranks; returns what rank 0 returns."""
    return on_ranks(RANKS, _LIMIT_S, body, *args)


@dataclass(frozen=True)
class MeasuredModel:
    """A model that was captured once, to be measured again and again.

    Attributes:
        ends: of the units that it is measured in.
    """

    subject: Subject
    captured: Captured
    ends: list[int]

    @classmethod
    def of(cls, subject: Subject, stages: int) -> MeasuredModel:
        """Captured for plans of at most so many stages, and trained once."""
        captured = capture(subject.model, subject.args, prove=False)
        model = cls(subject, captured, units_to_plan(captured.module, None, stages, None)[0])
        # What is timed later finds memory as in the middle of a training: kept, and with gradients to add to.
        keep_freed_memory(model)
        _keep_gradients(subject.model)
        model.train()
        return model

    def costs(self, comm: ProcessGroupComm) -> CostModel:
        """The mean of what all ranks measure at the same time."""
        comm.barrier()
        signature, subject = self.captured.signature, self.subject
        loss = GraphLoss(subject.loss_fn, subject.target, signature.unflatten)
        own = cost_model(self.captured.module, self.ends, signature.flatten(subject.args, {}), loss=loss)
        models = [CostModel.from_json(text) for text in comm.all_gather_object(own.to_json())]
        total = models[0]
        for other in models[1:]:
            total = average(total, other)
        return total

    def train(self) -> None:
        """What a step computes, uncut."""
        for _ in range(MICROBATCHES):
            loss = self.subject.loss_fn(self.subject.model(*self.subject.args), self.subject.target)
            (loss / MICROBATCHES).backward()


class Steps:
    """Training steps of a model that is cut as a plan says; called, it runs one."""

    def __init__(self, subject: Subject, plan: Plan, comm: ProcessGroupComm) -> None:
        pipe = pipeline(subject.model, subject.args, plan=plan, prove=False)
        self._runner = pipe.schedule(subject.loss_fn, comm=comm)
        self.modules = [stage.module for stage in self._runner.stages.values()]
        self._batch = tuple(torch.cat([arg] * MICROBATCHES) for arg in subject.args)
        self._target = torch.cat([subject.target] * MICROBATCHES)
        for module in self.modules:
            _keep_gradients(module)
        self()

    def __call__(self) -> None:
        self._runner.step(*self._batch, target=self._target, return_outputs=False)

    def close(self) -> None:
        """Free what its schedule keeps."""
        self._runner.close()


def _keep_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)


def average(one: CostModel, other: CostModel) -> CostModel:
    """The mean of two measurements of one model."""
    units = tuple(
        replace(
            left,
            forward_s=(left.forward_s + right.forward_s) / 2,
            backward_s=(left.backward_s + right.backward_s) / 2,
            backward_input_s=((left.backward_input_s or 0.0) + (right.backward_input_s or 0.0)) / 2,
            backward_weight_s=((left.backward_weight_s or 0.0) + (right.backward_weight_s or 0.0)) / 2,
            spread=max(left.spread, right.spread),
        )
        for left, right in zip(one.units, other.units, strict=True)
    )
    return replace(one, units=units)


def stage_costs(costs: CostModel, plan: Plan) -> list[StageCost]:
    """What the stages of a plan cost."""
    cuts = [0, *(stage.last_unit + 1 for stage in plan.stages)]
    shared, tied = shared_on_rank(costs, cuts, plan.placement), tied_messages(costs, cuts)
    summed = summed_gradients(costs, cuts)
    return [
        replace(
            recomputed_cost(
                costs,
                stage.first_unit,
                stage.last_unit,
                parameter_copies=0.0,
                shared=shared[stage.index],
            ),
            tied_gradients=tied[stage.index],
            summed_gradients=summed[stage.index],
        )
        for stage in plan.stages
    ]
