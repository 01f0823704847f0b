"""Where ``torch.distributed.pipelining`` gets gradients wrong: each test first shows that it (still) does,
then that partita is right.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pipelining.models import PLAIN, WIDTH
from tests.pipelining.running import cut
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from partita import pipelining as ours
from partita.runtime import Comm, InProcessWorld

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.usefixtures("alone")
def test_eval_after_a_step_rescales_its_gradients() -> None:
    model, ((x,), _, target) = PLAIN.model(), PLAIN.data(8)
    schedule = theirs.ScheduleGPipe(theirs.PipelineStage(model, 0, 1, CPU), 4, loss_fn=functional.mse_loss)
    schedule.step(x, target=target)
    first = model.a.weight.grad.clone()
    schedule.eval(x, target=target)
    torch.testing.assert_close(model.a.weight.grad, first / 4)  # the optimizer takes a quarter of its step
    pipe = cut(PLAIN, 1)

    def body(comm: Comm) -> None:
        stage = pipe.build_stage(0, comm=comm)
        mine = ours.ScheduleGPipe(stage, 4, functional.mse_loss)
        mine.step(x, target=target)
        before = stage.module.get_parameter("a.weight").grad.clone()
        torch.testing.assert_close(before, first)
        mine.eval(x, target=target)
        assert torch.equal(stage.module.get_parameter("a.weight").grad, before)

    InProcessWorld(1).run(body)


def _stages() -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """The model after a backward pass, and its halves, as two processes of torch's have them."""
    model, ((x,), _, target) = PLAIN.model(), PLAIN.data(8)
    functional.mse_loss(model(x), target).backward()
    halves = copy.deepcopy(model)
    for mine, other in zip(halves.parameters(), model.parameters(), strict=True):
        mine.grad = other.grad.clone()
    return model, [torch.nn.ModuleList([halves.a, halves.b]), torch.nn.ModuleList([halves.c, halves.d])]


def test_clipping_each_stage_is_not_clipping_the_model() -> None:
    model, stages = _stages()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for stage in stages:
        assert torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.1) < 0.99 * norm
    assert not torch.allclose(stages[0][0].weight.grad, model.a.weight.grad)
    pipe = cut(PLAIN, 2, samples=8)

    def body(comm: Comm) -> dict[str, Tensor]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        stage.module.requires_grad_(True)
        schedule = ours.ScheduleGPipe(stage, 1, functional.mse_loss)
        args, _, target = PLAIN.data(8)
        schedule.step(*args, target=target)
        torch.testing.assert_close(ours.clip_grad_norm_(schedule, 0.1), norm)
        return {name: value.grad for name, value in stage.module.named_parameters()}

    for gradients in InProcessWorld(2).run(body):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_a_scaler_on_each_stage_skips_the_step_on_one_of_them_only() -> None:
    _, stages = _stages()
    stages[0][0].weight.grad[0, 0] = float("inf")
    moved = []
    for stage in stages:
        before = [value.detach().clone() for value in stage.parameters()]
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        moved.append(any(not torch.equal(*pair) for pair in zip(before, stage.parameters(), strict=True)))
    assert moved == [False, True]
    # ours: tests/pipelining/training/test_scaler.py::test_all_ranks_skip_and_scale_as_the_uncut_model_does


def _autocast(comm: Comm) -> dict[str, Any]:
    """A batch in full precision, then one under autocast: what comes out of each package on the last rank."""
    torch.set_num_threads(1)
    (x,), _, _ = PLAIN.data(8)
    mine = ours.ScheduleGPipe(cut(PLAIN, 2).build_stage(comm.rank, comm=comm), 4)
    model = PLAIN.model()
    half = torch.nn.Sequential(model.a, model.b) if comm.rank == 0 else torch.nn.Sequential(model.c, model.d)
    other = theirs.ScheduleGPipe(theirs.PipelineStage(half, comm.rank, 2, CPU), 4)
    outputs: dict[str, Any] = {}
    for precision in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision):
            outputs["ours"] = mine.eval(x)
            outputs["theirs"] = other.step(x) if comm.rank == 0 else other.step()
    return {name: None if value is None else value.float().tolist() for name, value in outputs.items()}


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 refuses the second batch")
def test_a_batch_under_autocast_after_one_without_it_is_read_as_another_dtype() -> None:
    (x,), _, _ = PLAIN.data(8)
    model = torch.nn.Sequential(*PLAIN.model().children())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        halves = [model(part) for part in x.split(2)]
    whole = PLAIN.model()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = torch.cat([whole(part) for part in x.split(2)]).float()
    by_rank = endings(2, _autocast)
    for ending in by_rank:
        assert ending.error is None, ending.text
    assert torch.equal(torch.tensor(by_rank[1].result["ours"]), expected)
    wrong = torch.tensor(by_rank[1].result["theirs"])
    assert not torch.allclose(wrong, torch.cat(halves).float(), rtol=0.1, atol=0.1)


STAGES = 3


def _linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)]


def _batch(replica: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1 + replica)
    return torch.randn(8, WIDTH), torch.zeros(8, WIDTH)


def _replicated(comm: Comm, package: str) -> list[list[Any] | None]:
    """A zero bubble step of all stages on this rank, each under DDP with its copy on the other; the gradients
    of their weights.
    """
    torch.set_num_threads(1)
    alone = [dist.new_group([rank]) for rank in range(2)][comm.rank]
    modules, (x, target) = _linears(), _batch(comm.rank)
    schedule: Any
    if package == "theirs":
        wrapped = [DistributedDataParallel(module) for module in modules]
        stages = [
            theirs.PipelineStage(module, index, STAGES, CPU, group=alone)
            for index, module in enumerate(wrapped)
        ]
        schedule = theirs.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=functional.mse_loss)
    else:
        cuts = {str(number): ours.SplitPoint.END for number in range(STAGES - 1)}
        pipe = ours.pipeline(nn.Sequential(*modules), (x[:2],), split_spec=cuts)
        mine = [pipe.build_stage(index, group=alone) for index in range(STAGES)]
        for stage in mine:
            stage.module = DistributedDataParallel(stage.module)
        schedule = ours.ScheduleInterleavedZeroBubble(mine, 4, functional.mse_loss)
    schedule.step(x, target=target)
    return [None if module.weight.grad is None else module.weight.grad.tolist() for module in modules]


def test_zero_bubble_under_ddp_does_not_reduce_the_gradients() -> None:
    models = [nn.Sequential(*_linears()) for _ in range(2)]
    for replica, model in enumerate(models):
        for part, target in zip(*(value.split(2) for value in _batch(replica)), strict=True):
            (functional.mse_loss(model(part), target) / 4).backward()
    means = [(one.weight.grad + other.weight.grad) / 2 for one, other in zip(*models, strict=True)]
    for ending in endings(2, _replicated, "ours"):
        assert ending.error is None, ending.text
        for gradient, mean in zip(ending.result, means, strict=True):
            assert torch.equal(torch.tensor(gradient), mean)
    if torch.__version__.startswith("2.11."):
        pytest.skip("stages on one rank send shapes to it over gloo there, which has no connection to itself")
    for ending in endings(2, _replicated, "theirs"):
        assert ending.error is None, ending.text
        reduced = [
            gradient is not None and torch.allclose(torch.tensor(gradient), mean)
            for gradient, mean in zip(ending.result, means, strict=True)
        ]
        assert reduced == [True, False, False]  # the first stage goes back whole
