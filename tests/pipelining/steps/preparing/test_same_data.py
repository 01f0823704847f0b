"""Ranks that load other batches are warned in the first step; what is no batch of their own is let be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from partita.pipelining import PipelineStage, Schedule1F1B, pipeline
from partita.runtime import Comm, InProcessWorld

Give = Callable[[int], dict[str, Any]]
X = torch.arange(32.0).reshape(8, 4)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.b(self.a(x) * mask)


def _warnings(give: Give, steps: int = 2) -> list[str]:
    """Of two ranks that train on what `give` says."""

    def body(comm: Comm) -> None:
        model = Named()
        pipe = pipeline(model, (X[:2], torch.ones(2, 1)), stages=2)
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 4, functional.mse_loss)
        for _ in range(steps):
            schedule.step(**give(comm.rank), target=X)

    return _caught(body)


def _caught(body: Callable[[Comm], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        InProcessWorld(2).run(body)
    return [str(one.message) for one in caught if " was given " in str(one.message)]


def _loader(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(X), batch_size=8, shuffle=True, generator=generator)


def test_ranks_that_shuffle_with_other_seeds_are_warned_once() -> None:
    """The model's arguments came from one order of the samples and targets from another; nothing said so."""
    mask = torch.ones(8, 1)
    (text,) = _warnings(lambda rank: {"x": next(iter(_loader(rank)))[0], "mask": mask})
    assert "rank 1 was given another batch than rank 0" in text
    assert "generator=torch.Generator().manual_seed(0)" in text
    assert _warnings(lambda _: {"x": next(iter(_loader(0)))[0], "mask": mask}) == []


@pytest.mark.parametrize(
    "elsewhere",
    [
        {},
        {"x": torch.zeros(8, 4), "mask": torch.ones(8, 1)},
        {"x": torch.randn(8, 2), "mask": torch.ones(8, 1)},
        {"x": torch.empty(8, 4, device="meta"), "mask": torch.ones(8, 1)},
    ],
    ids=["nothing", "placeholders", "another shape", "no memory"],
)
def test_what_is_no_batch_is_not_compared(elsewhere: dict[str, Tensor]) -> None:
    assert _warnings(lambda rank: elsewhere if rank else {"x": X, "mask": torch.ones(8, 1)}, steps=1) == []


def test_a_keyword_argument_that_the_first_stage_is_not_given_is_warned_of() -> None:
    """Without a word it changed nothing: a mask, or a weight for loss_fn, on the last rank."""
    batch, weight = {"x": X, "mask": torch.ones(8, 1)}, torch.full((8, 1), 2.0)
    (text,) = _warnings(lambda rank: (batch, batch | {"weight": weight})[rank])
    assert text.startswith("rank 1 was given 'weight' in step 1, and rank 0 was not")
    assert "loss_kwargs" in text
    assert _warnings(lambda rank: (batch, batch | {"weight": None})[rank]) == []


def test_keyword_arguments_of_own_modules_may_differ() -> None:
    """Each stage has its own."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(x) * scale

    def body(comm: Comm) -> None:
        stage = PipelineStage(Scaled(4, 4), comm.rank, 2, "cpu", comm=comm)
        schedule = Schedule1F1B(stage, 4, functional.mse_loss)
        args = () if comm.rank else (X,)
        schedule.step(*args, scale=X[:, :1] + comm.rank, target=X)

    assert _caught(body) == []


def test_ranks_that_part_in_a_later_epoch_are_warned_too() -> None:
    """One rank drew a number for its log, and the global generator shuffled the second epoch otherwise: only
    the first step was looked at."""
    mask = torch.ones(8, 1)
    orders = [[next(iter(_loader(seed)))[0] for seed in seeds] for seeds in ((0, 1, 2, 3), (0, 1, 7, 8))]
    steps = [iter(order) for order in orders]
    (text,) = _warnings(lambda rank: {"x": next(steps[rank]), "mask": mask}, steps=4)
    assert "rank 1 was given another batch than rank 0 in step 4" in text


def test_what_is_gathered_before_steps_gets_rare() -> None:
    """What ranks were given in steps 1, 2, 4, 8; norms of gradients in the second to the eighth."""

    def body(comm: Comm) -> list[int]:
        pipe = pipeline(Named(), (X[:2], torch.ones(2, 1)), stages=2)
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 4, functional.mse_loss)
        gathered: list[int] = []
        gather = comm.all_gather_object

        def counted(obj: Any) -> list[Any]:
            gathered[-1] += 1
            return gather(obj)

        comm.all_gather_object = counted  # type: ignore[method-assign]
        for _ in range(10):
            gathered.append(0)
            schedule.step(X, torch.ones(8, 1), target=X)
        return gathered

    assert InProcessWorld(2).run(body) == [[1, 2, 1, 2, 1, 1, 1, 2, 0, 0]] * 2


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64]
)
def test_any_dtype_is_compared(dtype: torch.dtype) -> None:
    class Casting(Named):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x, mask.real.float())

    def body(comm: Comm) -> None:
        masks = [(torch.arange(8)[:, None] % 2).to(dtype), (torch.arange(8)[:, None] // 4).to(dtype)]
        pipe = pipeline(Casting(), (X[:2], masks[0][:2]), stages=2, prove=False)
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 4, functional.mse_loss)
        schedule.step(X, masks[comm.rank], target=X)

    assert len(_caught(body)) == 1
