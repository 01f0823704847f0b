"""Two pipelines over the same modules, a parameter on other ranks in each: one leaves the other behind."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, cast

import pytest
import torch
from tests.runtime.worlds import endings
from torch import nn

from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.pipelining.frontends.pipe import Pipe
from partita.pipelining.steps.preparing.arguments import StepArguments
from partita.pipelining.steps.preparing.outdated_copies import OutdatedCopies
from partita.pipelining.steps.preparing.preparation import Accepted, PreparedStep
from partita.runtime import Comm, InProcessWorld

COMM, ARGUMENTS = cast(Comm, object()), cast(StepArguments, object())


class Prepared:
    """Stands for what else prepares a step."""

    def accept(self, arguments: StepArguments) -> Accepted:
        return cast(Accepted, arguments)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        return cast(PreparedStep, accepted)


def _cut(model: nn.Module, at: str) -> Pipe:
    return pipeline(
        model, (torch.randn(2, 4),), split_spec={at: SplitPoint.BEGINNING}, frontend="modules", prove=False
    )


def _step(module: nn.Module, *, gradients: bool = True) -> None:
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) if gradients else None
    torch.optim.SGD(parameters, lr=0.1).step()


def test_what_was_stepped_here_and_runs_elsewhere_is_named_once() -> None:
    judge, maker = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    both = _cut(nn.Sequential(maker, judge), "1").build_stage(0)  # the judge is on rank 1
    alone = _cut(judge, "1").build_stage(0)  # its first layer is on rank 0
    copies = OutdatedCopies(Prepared(), COMM, [both], (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(both.module)
        _step(alone.module, gradients=False)
        copies.accept(ARGUMENTS)
    _step(alone.module)
    with pytest.warns(UserWarning, match=r"has stepped '1.0.weight', '1.0.bias', and .* on rank 1, which"):
        copies.accept(ARGUMENTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies.accept(ARGUMENTS)


def test_ranks_of_one_process_and_stages_of_one_rank_have_one_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = _cut(model, "1")
    first, second = pipe.build_stage(0), pipe.build_stage(1)
    world = InProcessWorld(2)
    watching = [OutdatedCopies(Prepared(), COMM, [first, second], (0, 0))]
    watching += world.run(lambda comm: OutdatedCopies(Prepared(), comm, [first], (0, 1)))
    _step(model)
    for copies in watching:
        copies.accept(ARGUMENTS)


def test_optimizers_do_not_keep_it() -> None:
    stage = _cut(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "1").build_stage(0)
    copies = OutdatedCopies(Prepared(), COMM, [stage], (0, 1))
    watcher = weakref.ref(copies)
    del copies
    assert watcher() is None
    _step(stage.module)


def _adversaries(comm: Comm) -> list[str]:
    torch.manual_seed(0)
    judge, maker = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    stages = [
        pipe.build_stage(comm.rank, comm=comm)
        for pipe in (_cut(judge, "1"), _cut(nn.Sequential(maker, judge), "1"))
    ]
    alone, both = (Schedule1F1B(stage, 2, nn.functional.mse_loss) for stage in stages)
    batch: dict[str, Any] = {"target": torch.zeros(4, 4)}
    optimizer = torch.optim.SGD(stages[0].module.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            alone.step(torch.ones(4, 4), **batch)
            optimizer.step()
            both.step(torch.ones(4, 4), **batch)
    return [f"{warning.filename}: {warning.message}" for warning in caught]


@pytest.mark.dear
def test_a_discriminator_on_other_ranks_than_behind_its_generator() -> None:
    """The copy on rank 1 kept its first values, and nobody said so."""
    first, second = (ending.result for ending in endings(2, _adversaries))
    (text,) = first
    assert text.startswith(__file__)
    assert "has stepped '1.0.weight', '1.0.bias'" in text
    assert second == []
