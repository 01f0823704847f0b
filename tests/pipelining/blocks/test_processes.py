"""Stages that run the model's own code as processes: what crosses has another size for each microbatch."""

from __future__ import annotations

import torch
from tests.pipelining.blocks_models import WIDTH, Indexed
from tests.runtime.worlds import endings
from torch import Tensor

from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.runtime import Comm

SPEC = {"blocks.2": SplitPoint.BEGINNING}


def _x(samples: int) -> Tensor:
    return torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))


def _loss(output: dict[str, Tensor], _: object = None) -> Tensor:
    return output["out"].square().sum() + output["picked"].sum()


def _train(comm: Comm) -> tuple[dict[str, list[float]], list[float]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pipe = pipeline(Indexed(), (_x(3),), split_spec=SPEC, frontend="modules")
    stage = pipe.build_stage(comm.rank, comm=comm)
    losses: list[Tensor] = []
    Schedule1F1B(stage, 3, _loss).step(_x(9), losses=losses, return_outputs=False)
    gradients = {
        name: parameter.grad.flatten().tolist()
        for name, parameter in stage.module.named_parameters()
        if parameter.grad is not None
    }
    return gradients, [loss.item() for loss in losses]


def test_processes_hand_on_what_they_find() -> None:
    outcomes = endings(2, _train)
    for ending in outcomes:
        assert ending.error is None, ending.text
    (first, nothing), (second, losses) = [ending.result for ending in outcomes]
    assert nothing == []
    torch.manual_seed(0)
    whole = Indexed()
    expected = []
    for part in _x(9).chunk(3):
        loss = _loss(whole(part))
        (loss / 3).backward()
        expected.append(loss.item())
    assert losses == expected
    gradients = {
        name: value.grad.flatten().tolist()
        for name, value in whole.named_parameters()
        if value.grad is not None
    }
    assert first | second == gradients
