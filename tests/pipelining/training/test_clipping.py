"""Clipping over all stages equals clipping the uncut model."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.group_of_one import group_of_one
from tests.pipelining.models import CASES, PLAIN, TRANSFORMER, Case
from tests.pipelining.running import assert_equal, cut, keyed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_ as torchs

from partita.errors import ExecutionError, PeerFailed, SignatureMismatch
from partita.pipelining import PipelineStage, Schedule1F1B, UncutReference, clip_grad_norm_
from partita.runtime import Comm, InProcessWorld

Clipped = tuple[Tensor, dict[str, Tensor | None]]


def _noted(norm: Tensor, *modules: nn.Module) -> Clipped:
    named = [item for module in modules for item in module.named_parameters(remove_duplicate=False)]
    return norm, {name: None if value.grad is None else value.grad.clone() for name, value in named}


class Wrapper(nn.Module):
    """Gives parameters other names than the model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _piped(case: Case, placement: tuple[int, ...], max_norm: float, *options: Any) -> list[Clipped]:
    pipe = cut(case, len(placement))

    def body(comm: Comm) -> Clipped:
        own = copy.deepcopy(pipe)
        stages = [own.build_stage(i, comm=comm) for i, rank in enumerate(placement) if rank == comm.rank]
        schedule = Schedule1F1B(stages, 4, case.loss)
        args, kwargs, target = case.data(8)
        schedule.step(*args, target=target, **kwargs)
        return _noted(clip_grad_norm_(schedule, max_norm, *options), *(stage.module for stage in stages))

    return InProcessWorld(max(placement) + 1).run(body)


def _uncut(case: Case, max_norm: float, *options: Any) -> Clipped:
    whole = keyed(case)
    args, kwargs, target = case.data(8)
    UncutReference(whole, 4, case.loss).step(*args, target=target, **kwargs)
    return _noted(torchs(list(whole.parameters()), max_norm, *options), whole)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_norm_and_the_gradients_are_those_of_the_uncut_model_bit_for_bit(case: Case) -> None:
    norm, gradients = _uncut(case, 0.1)
    for piped_norm, mine in _piped(case, tuple(range(len(case.after) + 1)), 0.1):
        assert_equal(piped_norm, norm)
        assert_equal(mine, {name: gradients[name] for name in mine})


@pytest.mark.parametrize("placement", [(0, 0, 0, 0), (0, 1, 1, 0), (1, 0, 1, 0)], ids=str)
def test_a_tied_parameter_counts_once_wherever_its_copies_are(placement: tuple[int, ...]) -> None:
    norm, gradients = _uncut(TRANSFORMER, 0.1)
    for piped_norm, mine in _piped(TRANSFORMER, placement, 0.1):
        assert_equal(piped_norm, norm)
        assert_equal(mine, {name: gradients[name] for name in mine})


def test_a_tied_parameter_counts_once_in_a_wrapper_of_ones_own_too() -> None:
    """It has another name there, and counted twice."""
    norm, _ = _uncut(TRANSFORMER, 0.1)
    pipe = cut(TRANSFORMER, 2)

    def body(comm: Comm) -> Tensor:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        stage.module = Wrapper(stage.module)
        schedule = Schedule1F1B(stage, 4, TRANSFORMER.loss)
        args, kwargs, target = TRANSFORMER.data(8)
        schedule.step(*args, target=target, **kwargs)
        return clip_grad_norm_(schedule, 0.1)

    for piped_norm in InProcessWorld(2).run(body):
        assert_equal(piped_norm, norm)


@pytest.mark.parametrize(
    ("norm_type", "foreach"),
    [(1.0, None), (2.0, None), (2.0, True), (2.0, False), (3.5, False), (float("inf"), None), ("inf", True)],
)
def test_any_norm_with_and_without_foreach(norm_type: float, foreach: bool | None) -> None:
    norm, gradients = _uncut(TRANSFORMER, 0.1, norm_type, False, foreach)
    for piped_norm, mine in _piped(TRANSFORMER, (0, 1), 0.1, norm_type, False, foreach):
        assert_equal(piped_norm, norm)
        assert_equal(mine, {name: gradients[name] for name in mine})


def test_gradients_within_the_limit_stay_as_they_are() -> None:
    _, gradients = _uncut(TRANSFORMER, 1e9)
    for _, mine in _piped(TRANSFORMER, (0, 1), 1e9):
        assert_equal(mine, {name: gradients[name] for name in mine})


def test_several_dtypes_are_put_together_too() -> None:
    def mixed() -> nn.Module:
        model = TRANSFORMER.make()
        model.blocks[0].feed[0].double()
        model.blocks[0].feed[0].register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.blocks[0].feed[0].register_forward_hook(lambda _, __, out: out.float())
        return model

    case = Case("mixed", mixed, TRANSFORMER.after, TRANSFORMER.batch, TRANSFORMER.loss)
    norm, gradients = _uncut(case, 0.1)
    for piped_norm, mine in _piped(case, (0, 1), 0.1):
        torch.testing.assert_close(piped_norm, norm, rtol=1e-6, atol=0)
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-12)


def _overflow(comm: Comm, error_if_nonfinite: bool, outcomes: dict[int, Any]) -> None:
    stage = copy.deepcopy(cut(PLAIN, 2)).build_stage(comm.rank, comm=comm)
    schedule = Schedule1F1B(stage, 4, PLAIN.loss)
    args, _, target = PLAIN.data(8)
    schedule.step(*args, target=target)
    if comm.rank == 0:
        stage.module.get_parameter("a.bias").grad[0] = float("inf")
    before = _noted(torch.zeros(()), stage.module)[1]
    try:
        outcomes[comm.rank] = clip_grad_norm_(schedule, 1.0, error_if_nonfinite=error_if_nonfinite)
    except ExecutionError as error:
        outcomes[comm.rank] = error
        assert_equal(_noted(torch.zeros(()), stage.module)[1], before)


def test_a_norm_that_is_not_finite_is_the_same_error_on_every_rank_and_changes_nothing() -> None:
    outcomes: dict[int, Any] = {}
    InProcessWorld(2).run(_overflow, True, outcomes)
    for rank in range(2):
        assert "is inf (not finite: a.bias), so they can't be clipped" in str(outcomes[rank])


def test_a_norm_that_is_not_finite_passes_where_torchs_default_lets_it() -> None:
    outcomes: dict[int, Any] = {}
    InProcessWorld(2).run(_overflow, False, outcomes)
    assert_equal([outcomes[0].item(), outcomes[1].item()], [float("inf")] * 2)


def test_a_rank_that_can_not_clip_is_an_error_on_every_rank() -> None:
    pipe, errors = cut(TRANSFORMER, 2), [None, None]

    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4)
        try:
            clip_grad_norm_(schedule, 1.0, "no number" if comm.rank else 2.0)
        except Exception as error:
            errors[comm.rank] = error
            raise

    with suppress(ValueError):
        InProcessWorld(2).run(body)
    assert isinstance(errors[1], ValueError)
    assert isinstance(errors[0], PeerFailed)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_norm", ((0.1, 2.0), (0.2, 2.0))),
        ("norm_type", ((0.1, 2.0), (0.1, 1.0))),
        ("error_if_nonfinite", ((0.1, 2.0, False), (0.1, 2.0, True))),
    ],
)
def test_ranks_that_clip_in_different_ways_are_refused_and_nothing_is_clipped(name: str, values: Any) -> None:
    """Each rank scaled its own stages by its own limit, or took norms of another order for its own."""
    pipe = cut(PLAIN, 2)

    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, PLAIN.loss)
        args, kwargs, target = PLAIN.data(8)
        schedule.step(*args, target=target, **kwargs)
        module = schedule.stages[comm.rank].module
        before = _noted(torch.zeros(()), module)[1]
        with pytest.raises(
            SignatureMismatch, match=f"{name} is .* on rank 0 and .* on rank 1: make them equal"
        ):
            clip_grad_norm_(schedule, *values[comm.rank])
        assert_equal(_noted(torch.zeros(()), module)[1], before)
        clip_grad_norm_(schedule, 0.1)  # and nothing has failed

    InProcessWorld(2).run(body)


def test_without_any_gradient_the_norm_is_zero() -> None:
    pipe = cut(TRANSFORMER, 2)

    def body(comm: Comm) -> Tensor:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4)
        return clip_grad_norm_(schedule, 1.0)

    assert_equal(InProcessWorld(2).run(body), [torch.tensor(0.0)] * 2)


@pytest.mark.parametrize("foreach", [None, False])
def test_sharded_and_whole_gradients_are_clipped_together(foreach: bool | None) -> None:
    """Torch computes with tensors of one mesh at a time; a stage with tensor parallel layers has more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))
    whole = copy.deepcopy(model)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    nn.functional.mse_loss(whole(x), y).backward()
    norm = torchs(list(whole.parameters()), 0.01)
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=dist.group.WORLD)
        schedule = Schedule1F1B(stage, 1, nn.functional.mse_loss)
        schedule.step(x, target=y)
        torch.testing.assert_close(clip_grad_norm_(schedule, 0.01, foreach=foreach), norm)
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            torch.testing.assert_close(gradient, theirs.grad)
        schedule.close()
