"""Pipelines side by side, each stage data parallel: DDP and ``fully_shard`` inside stages."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.composition.grid import MICROBATCHES, Place, cut, data, gradients, place, uncut, weights, wrap
from tests.pipelining.models import PLAIN, TRANSFORMER, Case
from tests.runtime.worlds import endings, patience
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from partita.ddp import Replicated
from partita.pipelining import Schedule1F1B, ScheduleGPipe, UncutReference, clip_grad_norm_
from partita.pipelining.schedules import PipelineSchedule
from partita.runtime import Comm

STEPS = 3


class ZeroBubble(PipelineSchedule):
    """Backward passes in two halves."""

    kind = "InterleavedZeroBubble"


KINDS: dict[str, type[PipelineSchedule]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "zero bubble": ZeroBubble,
}
RUNS = [
    ("ddp", "gpipe", "plain", "exact"),
    ("ddp", "1f1b", "plain", "exact"),
    ("ddp", "zero bubble", "plain", "exact"),
    ("ddp", "1f1b", "transformer", "exact"),
    ("fsdp", "gpipe", "plain", "exact"),
    ("fsdp", "1f1b", "transformer", "reduced"),
    ("fsdp", "zero bubble", "plain", "exact"),
    ("replicate", "1f1b", "plain", "exact"),
    ("replicate", "zero bubble", "transformer", "exact"),
    ("ddp", "zero bubble, compiled", "plain", "exact"),
    ("fsdp", "zero bubble, compiled", "transformer", "reduced"),
]
"""What is done in one launch of four processes: wrapper, schedule, model, tied gradients."""

CASES = {"plain": PLAIN, "transformer": TRANSFORMER}
Found = dict[str, Any]


def _no_dropout(modules: list[nn.Module]) -> None:
    """The two pipelines draw from the same keys, the uncut model from twice as many."""
    for module in modules:
        module.eval()


def _train(runner: Any, module: nn.Module, case: Case, pipeline: int | None) -> Found:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    norms: list[Tensor] = []
    for step in range(STEPS):
        args, target = data(case, step, pipeline)
        runner.step(*args, target=target)
        if isinstance(runner, UncutReference):
            norms.append(torch.nn.utils.clip_grad_norm_(list(module.parameters()), 0.5))
        else:
            norms.append(clip_grad_norm_(runner, 0.5))
        found = gradients(module)
        optimizer.step()
        optimizer.zero_grad()
    noted = {"norms": norms, "gradients": found, "weights": weights(module)}
    if isinstance(runner, UncutReference):
        for step in range(2):
            args, target = data(case, step, None)
            runner.step(*args, target=target)
        noted["accumulated"] = gradients(module)
    return noted


_SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
"""What ``fully_shard`` calls, by version of torch."""


class _Traffic:
    """How often the gradients of a stage have travelled between its replicas."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self._name = next(name for name in _SCATTERS if hasattr(dist, name))
        self._original = getattr(dist, self._name)
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, self._bucket)
        elif isinstance(module, Replicated):
            module.replication.reducer.pass_ended = self._pass
        setattr(dist, self._name, self._scatter)

    def close(self) -> None:
        setattr(dist, self._name, self._original)

    def _pass(self, _: object) -> None:
        self.count += 1

    def _bucket(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and wants no text
        self.count += 1
        return default_hooks.allreduce_hook(self.group, bucket)

    group: dist.ProcessGroup

    def _scatter(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._original(*args, **kwargs)


def _accumulated(schedule: PipelineSchedule, module: nn.Module, here: Place) -> Found:
    """Two steps of which only the second reduces, and how often gradients travelled in each."""
    traffic = _Traffic(module)
    traffic.group = here.replicas.get_group()
    counts = []
    for step in range(2):
        args, target = data(PLAIN, step, here.pipeline)
        if isinstance(module, (DistributedDataParallel, Replicated)):
            with module.no_sync() if step == 0 else nullcontext():
                schedule.step(*args, target=target)
        else:
            module.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
            schedule.step(*args, target=target)
        counts.append(traffic.count)
    traffic.close()
    return {"gradients": gradients(module), "counts": counts}


def _body(comm: Comm) -> bytes:
    torch.set_num_threads(1)
    here = place()
    pipes = {name: cut(case) for name, case in CASES.items()}
    found = []
    for how, kind, name, tied in RUNS:
        case = CASES[name]
        stage = copy.deepcopy(pipes[name]).build_stage(here.stage, comm=here.comm)
        _no_dropout([stage.module])
        kind, _, compiled = kind.partition(", ")
        if compiled:
            stage.compile("aot_eager")
        wrap(stage, how, here.replicas)
        schedule = KINDS[kind](stage, MICROBATCHES, case.loss, tied_gradients=tied)
        found.append(_train(schedule, stage.module, case, here.pipeline))
        if name == "plain":
            found[-1]["accumulated"] = _accumulated(schedule, stage.module, here)
    here.comm.close()
    return pickle.dumps(found)


@pytest.fixture(scope="module")
def by_rank() -> list[list[Found]]:
    """What each of four processes found, run by run."""
    with patience(100.0):
        ends = endings(4, _body)
    for ending in ends:
        assert ending.error is None, ending.text
    return [pickle.loads(ending.result) for ending in ends]


@lru_cache
def _expected(case: Case) -> Found:
    def run(runner: UncutReference, whole: nn.Module) -> Found:
        _no_dropout([whole])
        return _train(runner, whole, case, None)

    return uncut(case, run)


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[" ".join(run) for run in RUNS])
def test_two_pipelines_equal_the_uncut_model_over_both_their_microbatches(
    number: int, by_rank: list[list[Found]]
) -> None:
    """Replicas sum in another order than one model does, so to 1e-6."""
    expected = _expected(CASES[RUNS[number][2]])
    for rank, runs in enumerate(by_rank):
        found = runs[number]
        for norm, other in zip(found["norms"], expected["norms"], strict=True):
            torch.testing.assert_close(norm, other, rtol=1e-5, atol=1e-7)
        for kind in ("gradients", "weights"):
            assert found[kind]
            for name, value in found[kind].items():
                torch.testing.assert_close(
                    value, expected[kind][name], rtol=1e-5, atol=1e-6, msg=f"{rank} {name}"
                )


@pytest.mark.parametrize("number", [n for n, run in enumerate(RUNS) if run[2] == "plain"])
def test_replicas_are_equal_bit_for_bit(number: int, by_rank: list[list[Found]]) -> None:
    for stage in range(2):
        one, other = by_rank[stage][number]["weights"], by_rank[2 + stage][number]["weights"]
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("number", [n for n, run in enumerate(RUNS) if run[2] == "plain"])
def test_gradients_travel_once_a_step_and_not_at_all_where_the_user_says_so(
    number: int, by_rank: list[list[Found]]
) -> None:
    expected = _expected(PLAIN)["accumulated"]
    for runs in by_rank:
        found = runs[number]["accumulated"]
        assert found["counts"] == [0, 1]
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
