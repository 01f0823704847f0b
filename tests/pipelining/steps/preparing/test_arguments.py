"""Microbatches that the user has made: equal to the batch that is cut into them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from tests.pipelining.models import MASK, TRANSFORMER, Case
from tests.pipelining.running import assert_equal, cut, errors_of
from torch import Tensor, nn
from torch.nn import functional

from partita.errors import MicrobatchError, PeerFailed
from partita.pipelining import PipelineStage, Schedule1F1B, SplitPoint, UncutReference, pipeline
from partita.runtime import Comm, InProcessWorld, split_args, split_tree

Call = Callable[[Any, int], Any]
Frontend = Literal["export", "modules"]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.lin(x) * scale.unsqueeze(-1)


def _batch(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randn(samples, *rest, generator=generator) for rest in ((4,), (), (4,)))  # type: ignore[return-value]


def _run(call: Call, count: int = 3, **options: Any) -> list[Any]:
    """Losses, result and gradients of two stages that are plain modules, by rank."""

    def body(comm: Comm) -> Any:
        stage = PipelineStage(Scaled(), comm.rank, 2, "cpu", comm=comm)
        schedule = Schedule1F1B(stage, count, functional.mse_loss, **options)
        losses: list[Tensor] = []
        result = call(lambda *args, **kwargs: schedule.step(*args, losses=losses, **kwargs), comm.rank)
        gradients = [parameter.grad for parameter in stage.submod.parameters()]
        evaluated = call(lambda *args, **kwargs: schedule.eval(*args, losses=losses, **kwargs), comm.rank)
        return [loss.detach() for loss in losses], result, evaluated, gradients

    return InProcessWorld(2).run(body)


def _whole(step: Any, rank: int) -> Any:
    x, scale, target = _batch(8)
    return step(*([x] if rank == 0 else []), scale=scale, **({"target": target} if rank else {}))


def test_microbatches_give_what_the_batch_gives() -> None:
    def made(step: Any, rank: int) -> Any:
        x, scale, target = _batch(8)
        parts = split_args((x,), {"scale": scale}, 3)
        return step(
            arg_mbs=[args for args, _ in parts] if rank == 0 else None,
            kwarg_mbs=[kwargs for _, kwargs in parts],
            target_mbs=split_tree(target, 3)[0] if rank else None,
        )

    assert_equal(_run(made), _run(_whole))
    assert_equal(_run(made, scale_grads=False), _run(_whole, scale_grads=False))


def test_sizes_of_their_own_are_weighted_by_their_samples() -> None:
    sizes = [5, 1, 2]

    def made(step: Any, rank: int) -> Any:
        x, scale, target = (tensor.split(sizes) for tensor in _batch(8))
        return step(
            arg_mbs=[(part,) for part in x] if rank == 0 else None,
            kwarg_mbs=[{"scale": part} for part in scale],
            target_mbs=list(target) if rank else None,
            loss_kwargs={"reduction": "mean"} if rank else None,
        )

    (_, _, _, first), (losses, result, evaluated, last) = _run(made)
    modules, (x, scale, target) = [Scaled(), Scaled()], _batch(8)
    whole = modules[1](modules[0](x, scale), scale)
    functional.mse_loss(whole, target).backward()
    torch.testing.assert_close(result, whole)
    assert torch.equal(result, evaluated)
    assert len(losses) == 3
    for gradients, module in ((first, modules[0]), (last, modules[1])):
        torch.testing.assert_close(gradients, [parameter.grad for parameter in module.parameters()])


def test_a_batch_and_microbatches_on_two_ranks_go_together() -> None:
    def mixed(step: Any, rank: int) -> Any:
        x, scale, target = _batch(8)
        parts = split_args((x,), {"scale": scale}, 3)
        if rank == 0:
            return step(arg_mbs=[args for args, _ in parts], kwarg_mbs=[kwargs for _, kwargs in parts])
        return step(scale=scale, target=target)

    assert_equal(_run(mixed), _run(_whole))


@pytest.mark.parametrize("case", [MASK, TRANSFORMER], ids=lambda case: case.name)
def test_captured_stages_take_microbatches_too(case: Case) -> None:
    pipe = cut(case, 2)

    def run(call: Callable[[Any, Any, Any, Any], Any]) -> Any:
        def body(comm: Comm) -> Any:
            own = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
            schedule = Schedule1F1B(own, 4, case.loss)
            args, kwargs, target = case.data(8)
            return call(schedule, args, kwargs, target), [p.grad for p in own.submod.parameters()]

        return InProcessWorld(2).run(body)

    def made(schedule: Schedule1F1B, args: Any, kwargs: Any, target: Any) -> Any:
        parts = split_args(args, kwargs, 4)
        return schedule.step(
            arg_mbs=[one for one, _ in parts],
            kwarg_mbs=[one for _, one in parts],
            target_mbs=split_tree(target, 4)[0],
        )

    whole = run(lambda schedule, args, kwargs, target: schedule.step(*args, target=target, **kwargs))
    assert_equal(run(made), whole)


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"arg_mbs": [(X,)] * 2},
            "arg_mbs has 2 microbatches, but the schedule has 3: give as many, or make",
        ),
        ({"kwarg_mbs": ({},)}, "kwarg_mbs has 1 microbatches, but the schedule has 3"),
        ({"arg_mbs": X}, "arg_mbs is a Tensor: give a list, one for a microbatch"),
        ({"arg_mbs": [X] * 3}, r"arg_mbs\[0\] is a Tensor: give a tuple of arguments, such as \(x,\)"),
        ({"kwarg_mbs": [X] * 3}, r"kwarg_mbs\[0\] is a Tensor: give a dict of keyword arguments"),
        (
            {"kwarg_mbs": [{}] * 3, "x": X},
            "the step is given a batch, and microbatches in arg_mbs or kwarg_mbs",
        ),
        ({"x": X.new_ones(6, 4), "target": X, "target_mbs": [X] * 3}, "is given a target and target_mbs"),
        (
            {"x": X.new_ones(6, 4), "target_mbs": [X] * 4},
            "target_mbs has 4 microbatches, but the schedule has 3",
        ),
    ],
)
def test_what_can_not_be_taken_says_why(arguments: dict[str, Any], message: str) -> None:
    def body(comm: Comm) -> None:
        stage = PipelineStage(nn.Identity(), 0, 1, "cpu", comm=comm)
        x = arguments.get("x")
        rest = {name: value for name, value in arguments.items() if name != "x"}
        Schedule1F1B(stage, 3, functional.mse_loss).step(*([] if x is None else [x]), **rest)

    with pytest.raises(MicrobatchError, match=message):
        InProcessWorld(1).run(body)


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_rank_that_does_not_have_the_first_stage_refuses_them_too(frontend: Frontend) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline(model, (X,), split_spec={"0": SplitPoint.END}, frontend=frontend)

    def body(comm: Comm) -> None:
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 3, functional.mse_loss)
        if comm.rank == 0:
            schedule.step(torch.ones(6, 4))
        else:
            schedule.step(target=torch.ones(6, 4), kwarg_mbs=[{}])

    first, second = errors_of(2, body)
    assert isinstance(second, MicrobatchError)
    assert "kwarg_mbs has 1 microbatches, but the schedule has 3" in str(second)
    assert isinstance(first, PeerFailed)


def test_what_a_schedule_was_made_with_can_be_read_and_not_set() -> None:
    """Ranks have agreed on it; ``scale_grads`` alone is an attribute of torch's that can be set."""

    def body(comm: Comm) -> None:
        stage = PipelineStage(nn.Identity(), 0, 1, "cpu", comm=comm)
        schedule = Schedule1F1B(stage, 3, functional.mse_loss, seed=7)
        assert (schedule.n_microbatches, schedule.seed, schedule.tied_gradients) == (3, 7, "exact")
        for name in ("n_microbatches", "seed", "tied_gradients"):
            with pytest.raises(AttributeError):
                setattr(schedule, name, getattr(schedule, name))
        schedule.scale_grads = False
        assert not schedule.options.scale_grads
        assert len(vars(schedule)) <= 12

    InProcessWorld(1).run(body)


def test_shares_that_nobody_can_tell_are_refused_where_they_count() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return self.lin(x).sum() + ends.sum()

    def body(comm: Comm, **options: Any) -> Any:
        stage = PipelineStage(Packed(), 0, 1, "cpu", comm=comm)
        schedule = Schedule1F1B(stage, 2, lambda output, _: output, **options)
        losses: list[Tensor] = []
        schedule.eval(arg_mbs=[(torch.ones(6, 4), torch.ones(3))] * 2)
        schedule.step(arg_mbs=[(torch.ones(6, 4), torch.ones(3))] * 2, losses=losses)
        return len(losses)

    errors = errors_of(1, body)
    assert "microbatch 0 has tensors that differ in their first dimension" in str(errors[0])
    assert "give loss_weights to step(), or make the schedule with scale_grads=False" in str(errors[0])
    assert InProcessWorld(1).run(lambda comm: body(comm, scale_grads=False)) == [2]


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_rank_that_has_a_batch_of_another_size_is_an_error(frontend: Frontend) -> None:
    """One rank's loader ended with a smaller batch than the others', and its loss broadcast the targets."""
    model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4), torch.randn(8, 4)
    where = {"split_spec": {"0": SplitPoint.END}}
    pipe = pipeline(model, (x[:2],), **where, **({} if frontend == "export" else {"frontend": "modules"}))  # type: ignore[arg-type]

    def stepped(*batches: tuple[Tensor, ...]) -> Any:
        def body(comm: Comm) -> list[Tensor]:
            stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
            losses: list[Tensor] = []
            schedule = Schedule1F1B(stage, 4, functional.mse_loss)
            schedule.step(*batches[comm.rank], target=y, losses=losses)
            return losses

        return body

    first, last = errors_of(2, stepped((x[:4],), (x,)))
    assert isinstance(first, PeerFailed)
    assert "rank 1 was given a batch of 8 samples, but the rank of the first stage one of 4" in str(last)
    # what the message says: the same batch on all ranks, or on the first stage's alone
    assert_equal(*(InProcessWorld(2).run(stepped((x,), other))[1] for other in ((x,), ())))


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_target_that_is_not_cut_like_the_batch_is_an_error(frontend: Frontend) -> None:
    """6 rows of targets for 8 samples made microbatches of 2, 2, 1 and 1, and the loss broadcast them."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    where = {"split_spec": {"0": SplitPoint.END}}
    pipe = pipeline(model, (x[:2],), **where, **({} if frontend == "export" else {"frontend": "modules"}))  # type: ignore[arg-type]
    message = r"the target has 6 rows, .* \(2, 2, 1, 1\), but .* \(2, 2, 2, 2\) samples"
    for evaluated in (False, True):

        def body(comm: Comm, evaluated: bool = evaluated) -> Any:
            schedule = Schedule1F1B(
                copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, functional.mse_loss
            )
            return (schedule.eval if evaluated else schedule.step)(x, target=torch.randn(6, 4), losses=[])

        first, last = errors_of(2, body)
        assert isinstance(first, PeerFailed)
        assert isinstance(last, MicrobatchError)
        assert re.search(message, str(last))
    with pytest.raises(MicrobatchError, match=message):
        UncutReference(model, 4, functional.mse_loss).step(x, target=torch.randn(6, 4))


def test_a_target_may_have_several_rows_for_each_sample() -> None:
    model, x, y = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4), torch.randn(32)
    pipe = pipeline(model, (x[:2],), split_spec={"0": SplitPoint.END})

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output.flatten(), target)

    def body(comm: Comm) -> list[Tensor]:
        losses: list[Tensor] = []
        Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 4, loss_fn).step(x, target=y, losses=losses)
        return losses

    losses: list[Tensor] = []
    UncutReference(model, 4, loss_fn).step(x, target=y, losses=losses)
    assert_equal(InProcessWorld(2).run(body)[1], losses)
