from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partita.errors import ArgumentError, ExecutionError, PeerFailed, VerificationFailed
from partita.pipelining import Pipe, Schedule1F1B, ScheduleInterleavedZeroBubble, UncutReference, pipeline
from partita.pipelining.interface.two_modes import graphs_in
from partita.pipelining.training import verify_step
from partita.runtime import Comm, InProcessWorld


class Draws(nn.Module):
    """Draws in every way: an operator that draws several times, in training only, and always."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.lstm = nn.LSTM(8, 8, num_layers=3, dropout=0.5, batch_first=True)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 1)
        self.again = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        h = self.lstm(self.drop(h)[:, None])[0][:, 0]
        h = h + 0.1 * torch.randn_like(h)
        return self.last(self.drop(self.again(h)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def made(stages: int = 2) -> tuple[nn.Module, Pipe]:
    torch.manual_seed(0)
    model = Draws()
    return model, pipeline(model, (torch.randn(3, 4),), stages=stages)


def run(
    model: nn.Module, pipe: Pipe, schedule_kind: Any = Schedule1F1B, ranks: int = 2, **options: Any
) -> list[list[Any]]:
    x, y = torch.randn(12, 4), torch.randn(12, 1)

    def body(comm: Comm) -> list[Any]:
        mine = copy.deepcopy(pipe)
        stages = [mine.build_stage(i, comm=comm) for i in range(comm.rank, pipe.num_stages, ranks)]
        schedule = schedule_kind(stages if len(stages) > 1 else stages[0], 4, loss_fn)
        reference = UncutReference(copy.deepcopy(model), 4, loss_fn, **options)
        losses: list[Tensor] = []
        for _ in range(2):
            verify_step(schedule, reference, x, target=y, losses=losses)
            for module in (*[stage.module for stage in stages], reference.whole):
                torch.optim.SGD([{"params": list(module.parameters())}], 0.1).step()
        return losses

    return InProcessWorld(ranks).run(body)


@pytest.mark.parametrize("mode", [True, False])
def test_steps_are_those_of_the_eager_model_with_the_random_numbers_of_the_graph(mode: bool) -> None:
    model, pipe = made()
    losses = run(model.train(mode), pipe.train(mode), graph=pipe.whole)
    assert [len(step_losses) for step_losses in losses] == [0, 4]


def test_several_stages_a_rank_and_a_split_backward_pass() -> None:
    model, pipe = made(4)
    run(model, pipe, ScheduleInterleavedZeroBubble, graph=pipe.whole)


@pytest.mark.parametrize("wrong", ["a number in the graph", "a weight"])
def test_what_differs_is_told_on_all_ranks(wrong: str) -> None:
    model, pipe = made()
    other = copy.deepcopy(model)
    if wrong == "a weight":
        other.get_submodule("last").bias.data += 1
    else:
        for stage in range(2):
            for graph in graphs_in(pipe.get_stage_module(stage)):
                for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
                    node.update_arg(1, 0.2)
                graph.recompile()
    message = "before any step:\n.* last.bias" if wrong == "a weight" else "gradient of "
    with pytest.raises(VerificationFailed, match=message):
        run(other, pipe, graph=pipe.whole)


def test_random_numbers_that_nobody_can_tell_are_refused() -> None:
    model, pipe = made()
    with pytest.raises((ExecutionError, PeerFailed), match=r"give graph=pipe\.whole"):
        run(model, pipe)
    with pytest.raises((ExecutionError, PeerFailed), match="the graph is not that of this model"):
        run(
            model,
            pipe,
            graph=pipeline(
                nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)), (torch.randn(3, 4),), stages=2
            ).whole,
        )


def test_random_numbers_of_a_checkpoint_are_refused() -> None:
    class Checkpointed(Draws):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed()
    reference = UncutReference(model, 4, loss_fn, graph=made()[1].whole)
    with pytest.raises(ExecutionError, match="in its backward pass"):
        reference.step(torch.randn(12, 4), target=torch.randn(12, 1))


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().mean()


def test_a_reference_that_is_run_without_a_loss_is_refused_and_the_advice_works() -> None:
    """Of a pipe with a loss_spec it ran forward alone, and every gradient was said to differ."""
    model, x = OwnLoss(), torch.randn(4, 4)
    pipe = pipeline(model, (x[:2],), stages=2, loss_spec=True)

    def verified(comm: Comm, loss_fn: Callable[..., Tensor] | None) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 2)
        verify_step(schedule, UncutReference(copy.deepcopy(model), 2, loss_fn), x)

    with pytest.raises(ArgumentError, match="was run without a loss, and the schedule has one"):
        InProcessWorld(2).run(lambda comm: verified(comm, None))
    InProcessWorld(2).run(lambda comm: verified(comm, lambda output, _: output))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.a(x)) + torch.rand(4, device=x.device))


def test_the_model_may_be_on_another_device_than_its_graph() -> None:
    """It was captured on the CPU, and its stages were built on a GPU: the graph was run on the CPU with what
    was on the GPU.
    """
    model = Noisy()
    pipe = pipeline(model, (torch.ones(2, 4),), stages=2)
    elsewhere = copy.deepcopy(model).to("meta")
    reference = UncutReference(elsewhere, 2, nn.functional.mse_loss, graph=pipe.whole)
    output = reference.step(torch.ones(4, 4, device="meta"), target=torch.ones(4, 4, device="meta"))
    assert output.is_meta
    assert output.shape == (4, 4)
    assert all(parameter.grad.is_meta for parameter in elsewhere.parameters())
    assert {parameter.device.type for parameter in pipe.whole.parameters()} == {"cpu"}
