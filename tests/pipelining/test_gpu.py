"""Pipelines on a real GPU: all ranks on the same one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cudagraphs.capturing import AllWorthIt
from tests.on_gpu import DEVICE, NEEDS_CUDA, ON_GPU, moved, on_gpu
from tests.pipelining.models import CASES, NORMED, SKIP, TRANSFORMER, Case
from tests.pipelining.running import STEPS, Record, assert_same, cut, piped, train, uncut
from tests.runtime.worlds import ProcessWorld, patience
from torch import Tensor, nn

from partita.cudagraphs import CudaGraphsRunner
from partita.pipelining import (
    GradScaler,
    UncutReference,
    get_schedule_class,
    keyed_graph,
    measure_units,
    pipeline,
)
from partita.planning import loop_placement, v_placement
from partita.runtime import Comm, InProcessWorld, ProcessGroupComm

pytestmark = ON_GPU

PLACEMENTS = {
    "Interleaved1F1B": loop_placement(4, 2),
    "InterleavedZeroBubble": loop_placement(4, 2),
    "ZBVZeroBubble": v_placement(4, 2),
    "VHalf": v_placement(4, 2),
}
ON_THE_GPU = {case.name: on_gpu(case) for case in CASES}
IN_FOUR = [case for case in CASES if len(case.after) == 3]


@pytest.mark.parametrize("case", IN_FOUR, ids=lambda case: case.name)
def test_stages_equal_the_uncut_model(case: Case) -> None:
    there = ON_THE_GPU[case.name]
    for kind in ("Interleaved1F1B", "ZBVZeroBubble"):
        records = piped(cut(there, 4), there, get_schedule_class(kind), 4, PLACEMENTS[kind])
        assert_same(records, uncut(there))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", list(PLACEMENTS))
def test_every_kind_of_schedule(kind: str, recompute: bool) -> None:
    there = ON_THE_GPU[TRANSFORMER.name]
    pipe = cut(there, 4, recompute=recompute)
    assert_same(piped(pipe, there, get_schedule_class(kind), 4, PLACEMENTS[kind]), uncut(there))


@pytest.mark.parametrize("case", [TRANSFORMER, SKIP, NORMED], ids=lambda case: case.name)
def test_compiled_stages_equal_the_uncut_model(case: Case) -> None:
    there = ON_THE_GPU[case.name]
    pipe = cut(there, 4, compile="aot_eager")
    for kind in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        assert_same(piped(pipe, there, get_schedule_class(kind), 4, PLACEMENTS[kind]), uncut(there))


def _first_step(runner: Any, modules: Sequence[nn.Module], case: Case, record: Record) -> None:
    args, kwargs, target = case.data(8)
    record.outputs.append(runner.step(*args, target=target, **kwargs))
    for module in modules:
        record.note(module)


@NEEDS_CUDA
def test_stages_that_inductor_compiles_are_near_the_uncut_model() -> None:
    there = ON_THE_GPU[NORMED.name]
    kind, expected = "ZBVZeroBubble", uncut(there, run=_first_step)
    # without the option Inductor draws other numbers than eager mode
    pipe = cut(there, 4, compile={"backend": "inductor", "options": {"fallback_random": True}})
    for record in piped(pipe, there, get_schedule_class(kind), 4, PLACEMENTS[kind], _first_step):
        for name, gradient in record.gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_recorded_stages_equal_the_uncut_model(kind: str) -> None:
    """F, I and W of each stage are CUDA graphs."""
    there = ON_THE_GPU[TRANSFORMER.name]
    pipe = cut(there, 4)

    def rank(comm: Comm) -> tuple[Record, int]:
        own, runner, record = copy.deepcopy(pipe), CudaGraphsRunner(saving=AllWorthIt()), Record()
        stages = [
            own.build_stage(index, comm=comm)
            for index, owner in enumerate(PLACEMENTS[kind])
            if owner == comm.rank
        ]
        for stage in stages:
            stage.compile(runner)
        schedule = get_schedule_class(kind)(stages, 4, there.loss)
        train(schedule, [stage.module for stage in stages], there, record)
        hits = sum(info.hits for graph in runner.graphs for info in graph.cache_info().values())
        return record, hits

    results = InProcessWorld(2).run(rank)
    assert_same([record for record, _ in results], uncut(there))
    for _, hits in results:
        assert hits > 2 * 4 * STEPS


def test_a_scaler_finds_what_is_not_finite_and_lowers_its_scale() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(DEVICE)
    pipe = pipeline(model, (torch.randn(2, 8, device=DEVICE),), stages=2)

    def rank(comm: Comm) -> tuple[float, list[Tensor]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = get_schedule_class("1F1B")(stage, 4, nn.functional.mse_loss)
        optimizer = torch.optim.SGD(stage.module.parameters(), 0.1)
        scaler = GradScaler(schedule, init_scale=2.0**30)
        for step in range(4):
            x = torch.full((8, 8), torch.inf if step == 0 else 1.0, device=DEVICE)
            with torch.autocast("cuda", torch.float16):
                schedule.step(x, target=torch.zeros(8, 8, device=DEVICE))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), [value.detach() for value in stage.module.parameters()]

    (first, ours), (second, others) = InProcessWorld(2).run(rank)
    assert first == second < 2.0**30
    assert all(value.isfinite().all() for value in (*ours, *others))


# --- over processes: gloo's messages go through the host, NCCL's from one part of the GPU to another ---


def _piped(comm: Comm, kind: str) -> bytes:
    torch.set_num_threads(1)
    there, record = on_gpu(TRANSFORMER), Record()
    pipe = cut(there, 4)
    own = [index for index, rank in enumerate(PLACEMENTS[kind]) if rank == comm.rank]
    stages = [pipe.build_stage(index, comm=comm) for index in own]
    schedule = get_schedule_class(kind)(stages, 4, there.loss)
    train(schedule, [stage.module for stage in stages], there, record)
    return pickle.dumps(moved([record.outputs, record.losses, record.gradients, record.state], "cpu"))


@pytest.mark.parametrize("backend", ["gloo", pytest.param("cpu:gloo,cuda:nccl", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("kind", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_processes_on_one_gpu(kind: str, backend: str) -> None:
    with patience(120.0):
        results = ProcessWorld(2, backend).run(_piped, kind)
    expected = uncut(ON_THE_GPU[TRANSFORMER.name])
    whole = Record(*moved([expected.outputs, expected.losses, expected.gradients, expected.state], "cpu"))
    assert_same([Record(*pickle.loads(data)) for data in results], whole)


@NEEDS_CUDA
def test_all_stages_on_the_one_rank_of_nccl() -> None:
    there, record = ON_THE_GPU[TRANSFORMER.name], Record()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ProcessGroupComm.from_group() as comm:
            pipe = cut(there, 4)
            stages = [pipe.build_stage(index, comm=comm) for index in range(4)]
            schedule = get_schedule_class("InterleavedZeroBubble")(stages, 4, there.loss)
            train(schedule, [stage.module for stage in stages], there, record)
            total = torch.ones(3, device=DEVICE)
            comm.all_reduce(total, (0,)).wait()
    finally:
        dist.destroy_process_group()
    assert_same([record], uncut(there))
    assert total.tolist() == [1.0] * 3


# --- costs ---


ROWS, SIZES = 4096, (512 * 513, 32768 * 513)


class Blocks(nn.Module):
    """A small layer, and one with 64 times the work."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Linear(512, 512), nn.Linear(512, 32768), nn.Linear(32768, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.large(self.small(x).relu()).relu())


@NEEDS_CUDA
def test_measured_costs_are_those_of_the_device_and_its_memory() -> None:
    model, x = Blocks().to(DEVICE), torch.randn(ROWS, 512, device=DEVICE)
    costs = measure_units(model, (x,), stages=2)
    small, large = (max(unit.forward_s for unit in costs.units if unit.parameters == n) for n in SIZES)
    assert large > 8 * small, "kernels are waited for, not only launched"


def test_a_schedule_with_numbers_of_microbatches_keeps_their_masks() -> None:
    """Dropout's masks are those of the same microbatch on the uncut model, whatever ran before."""
    there = ON_THE_GPU[TRANSFORMER.name]
    args, kwargs, target = there.data(8)
    whole = keyed_graph(there.model(), *there.data(2)[:2])
    losses: dict[str, list[Any]] = {"uncut": [], "piped": []}
    UncutReference(whole, 4, there.loss).step(*args, target=target, losses=losses["uncut"], **kwargs)
    torch.randn(1000, device=DEVICE)
    pipe = cut(there, 2)

    def rank(comm: Comm) -> list[Tensor]:
        own: list[Tensor] = []
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        schedule = get_schedule_class("1F1B")(stage, 4, there.loss)
        schedule.step(*args, target=target, losses=own, **kwargs)
        return own

    losses["piped"] = [loss for found in InProcessWorld(2).run(rank) for loss in found]
    assert [float(loss) for loss in losses["piped"]] == [float(loss) for loss in losses["uncut"]]
