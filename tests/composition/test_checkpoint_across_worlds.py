"""Pipelines side by side save one checkpoint; other worlds, other cuts and the uncut model go on from it.

::

    2 x 2 processes, sharded      --\
    2 x 2 processes, replicated   ---+-->   2 x 2 processes cut elsewhere, 3 processes in 3 stages, uncut
    uncut                         --/
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.composition.grid import MICROBATCHES, SAMPLES, Halves, Place, data, full, place, plain, wrap
from tests.pipelining.models import TRANSFORMER, WIDTH, Case
from tests.pipelining.resuming import optimizer_for, scramble
from tests.pipelining.running import assert_equal, cut, keyed
from tests.runtime.worlds import ProcessWorld, patience
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.optim import Optimizer

from partita.pipelining import (
    Pipe,
    Schedule1F1B,
    UncutReference,
    load_checkpoint,
    save_checkpoint,
)
from partita.runtime import Comm

SAVED_AFTER, STEPS = 2, 4


class Odd(nn.Module):
    """Sizes that two ranks can't share evenly, down to one element; dropout; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(nn.functional.dropout(self.a(x).tanh(), 0.2, self.training)) * self.scale
        return self.d(nn.functional.dropout(self.c(h).relu(), 0.2, self.training))


ODD = Case("odd", Odd, batch=lambda n: ((torch.randn(n, WIDTH),), {}, torch.randn(n, 1)))
CASES = {"fsdp": ODD, "ddp": TRANSFORMER, "uncut": ODD, "fsdp tied": TRANSFORMER}
"""By who saves: what is trained."""

EXACT = ("fsdp", "ddp", "uncut")
"""Sharded copies of a tied parameter sum their gradients in another order than the uncut model."""

CUTS = {
    "odd": (("b",), ("a",), ("a", "c")),
    "transformer": (("blocks.0",), ("embedding",), ("embedding", "blocks.1")),
}
"""Where a model is cut: as it is saved, elsewhere, and in three."""

RESUMED = [("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "ddp"), ("uncut", "fsdp")]
"""Who has saved, and what the stages that go on are wrapped in."""

State = dict[str, Tensor]


def _state(module: nn.Module, optimizer: Optimizer) -> State:
    """Parameters, buffers, and what the optimizer knows. Collective where they are sharded."""
    held = plain(module).state_dict(keep_vars=True)
    known = {
        f"{name}.{key}": value
        for name, parameter in held.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return {name: full(value.detach()).clone() for name, value in (held | known).items()}


def _train(runner: Any, optimizer: Optimizer, case: Case, pipeline: int | None, steps: range) -> None:
    """With one pipeline's half of each batch, or the whole."""
    runner.load_state_dict({"steps": steps.start})
    for step in steps:
        args, target = data(case, step, pipeline)
        runner.step(*args, target=target)
        optimizer.step()
        optimizer.zero_grad()


def _begin(here: Place, pipe: Pipe, source: str, folder: str) -> None:
    """Train wrapped stages, and save them."""
    stage = pipe.build_stage(here.stage, comm=here.comm)
    wrap(stage, source.split()[0], here.replicas)
    optimizer, case = optimizer_for(stage.module), CASES[source]
    tied: Literal["exact", "reduced"] = "exact" if source in EXACT else "reduced"
    schedule = Schedule1F1B(stage, MICROBATCHES, case.loss, seed=here.pipeline, tied_gradients=tied)
    _train(schedule, optimizer, case, here.pipeline, range(SAVED_AFTER))
    save_checkpoint(f"{folder}/{source}", stage, optimizer, extra={"step": SAVED_AFTER})


def _go_on(here: Place, pipe: Pipe, source: str, how: str, folder: str) -> State:
    """Load into other stages with another wrapper, and train on."""
    stage = pipe.build_stage(here.stage, comm=here.comm)
    scramble([stage.module], 7)
    wrap(stage, how, here.replicas)
    optimizer, case = optimizer_for(stage.module), CASES[source]
    restored = load_checkpoint(f"{folder}/{source}", stage, optimizer)
    schedule = Schedule1F1B(stage, MICROBATCHES, case.loss, seed=here.pipeline)
    _train(schedule, optimizer, case, here.pipeline, range(restored.extra["step"], STEPS))
    return _state(stage.module, optimizer)


def _two_by_two(comm: Comm, pickled: bytes, folder: str) -> bytes:
    torch.set_num_threads(1)
    here = place()
    for source in ("fsdp", "ddp", "fsdp tied"):
        _begin(here, pickle.loads(pickled)[CASES[source].name][0], source, folder)
    found = {run: _go_on(here, pickle.loads(pickled)[CASES[run[0]].name][1], *run, folder) for run in RESUMED}
    here.comm.close()
    return pickle.dumps(found)


def _three(comm: Comm, pickled: bytes, folder: str) -> bytes:
    """One pipeline of three stages, on what each of the others has saved."""
    torch.set_num_threads(1)
    found = {}
    for source, case in CASES.items():
        stage = pickle.loads(pickled)[case.name][2].build_stage(comm.rank, comm=comm)
        scramble([stage.module], comm.rank)
        optimizer = optimizer_for(stage.module)
        load_checkpoint(f"{folder}/{source}", stage, optimizer)
        schedule = Schedule1F1B(stage, 2 * MICROBATCHES, case.loss)
        _train(schedule, optimizer, case, None, range(SAVED_AFTER, STEPS))
        found[source] = _state(stage.module, optimizer)
    return pickle.dumps(found)


def _halves(case: Case, steps: int) -> tuple[nn.Module, Optimizer]:
    """The uncut model after some steps of two pipelines."""
    halves = Halves(case)
    optimizer = optimizer_for(halves.whole)
    for step in range(steps):
        halves.step([data(case, step, pipeline) for pipeline in range(2)])
        optimizer.step()
        optimizer.zero_grad()
    return halves.whole, optimizer


def _whole(case: Case, module: nn.Module, optimizer: Optimizer) -> State:
    """The uncut model goes on, with whole batches."""
    _train(
        UncutReference(module, 2 * MICROBATCHES, case.loss), optimizer, case, None, range(SAVED_AFTER, STEPS)
    )
    return _state(module, optimizer)


_Ranks = list[dict[Any, State]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, _Ranks, _Ranks]:
    """Where the checkpoints are, what four processes hold at the end, and what three do."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cuts = {
        case.name: [
            cut(replace(case, after=after), len(after) + 1, SAMPLES // 2 // MICROBATCHES)
            for after in CUTS[case.name]
        ]
        for case in (ODD, TRANSFORMER)
    }
    save_checkpoint(folder / "uncut", *_halves(ODD, SAVED_AFTER), extra={"step": SAVED_AFTER})
    given = pickle.dumps(cuts), str(folder)
    with patience(100.0):
        four = [pickle.loads(found) for found in ProcessWorld(4).run(_two_by_two, *given)]
        three = [pickle.loads(found) for found in ProcessWorld(3).run(_three, *given)]
    return folder, four, three


@lru_cache
def _uninterrupted(case: Case) -> State:
    """Two pipelines' steps, and then those with whole batches, without a checkpoint in between."""
    return _whole(case, *_halves(case, SAVED_AFTER))


def _assert_parts(parts: list[State], expected: State) -> None:
    for number, part in enumerate(parts):
        assert_equal(part, {name: expected[name] for name in part}, f"rank {number}")
    assert set().union(*parts) == expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("resumed", RESUMED, ids=[f"{source} to {how}" for source, how in RESUMED])
def test_two_by_two_go_on_cut_elsewhere(resumed: tuple[str, str], run: tuple[Path, _Ranks, _Ranks]) -> None:
    expected = _state(*_halves(CASES[resumed[0]], STEPS))
    _assert_parts([found[resumed] for found in run[1]], expected)


@pytest.mark.parametrize("source", EXACT)
def test_three_stages_go_on(source: str, run: tuple[Path, _Ranks, _Ranks]) -> None:
    _assert_parts([found[source] for found in run[2]], _uninterrupted(CASES[source]))


def _resumed(source: str, folder: Path) -> State:
    """The uncut model on what was saved, with other weights before."""
    case = CASES[source]
    module = keyed(case, SAMPLES // 2 // MICROBATCHES)
    scramble([module], 3)
    optimizer = optimizer_for(module)
    load_checkpoint(folder / source, module, optimizer)
    return _whole(case, module, optimizer)


@pytest.mark.parametrize("source", EXACT)
def test_the_uncut_model_goes_on(source: str, run: tuple[Path, _Ranks, _Ranks]) -> None:
    assert_equal(_resumed(source, run[0]), _uninterrupted(CASES[source]))


def test_sharded_copies_of_a_tied_parameter_go_on_as_one(run: tuple[Path, _Ranks, _Ranks]) -> None:
    expected = _resumed("fsdp tied", run[0])
    assert torch.equal(expected["embedding.weight"], expected["head.weight"])
    _assert_parts([found["fsdp tied"] for found in run[2]], expected)


def test_a_sharded_tensor_is_stored_in_pieces_that_cover_it_once(run: tuple[Path, _Ranks, _Ranks]) -> None:
    there = FileSystemReader(run[0] / "fsdp").read_metadata().state_dict_metadata
    tensors = {name: it for name, it in there.items() if isinstance(it, TensorStorageMetadata)}
    assert tensors.keys() >= {f"model.{name}" for name in ODD.model().state_dict()}
    for name, stored in tensors.items():
        assert sum(chunk.sizes.numel() for chunk in stored.chunks) == stored.size.numel(), name
    for name in ("model.a.weight", "optim.state.a.weight.exp_avg"):
        assert [tuple(chunk.sizes) for chunk in tensors[name].chunks] == [(3, WIDTH), (2, WIDTH)]
