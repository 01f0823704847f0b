"""What a rank keeps in memory: what ``torch.distributed.pipelining`` (still) keeps, and partita does not."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita import pipelining as ours
from partita.runtime import Comm

CPU = torch.device("cpu")
RANKS, ROWS, WIDTH = 3, 16, 32
MESSAGE = ROWS * WIDTH * 4
"""Bytes that go from one rank to the next for a microbatch."""
TRAILER = 6 * 8
"""Bytes of the numbers behind a message, whose memory is kept for the next step."""

FEW, SOME, MANY = 16, 32, 64
"""Microbatches in a step."""

pytestmark = [
    pytest.mark.dear,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def _linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS)))


def _cut(package: Any, model: nn.Module) -> Any:
    cuts = {str(number): package.SplitPoint.END for number in range(RANKS - 1)}
    return package.pipeline(model, (torch.zeros(ROWS, WIDTH),), split_spec=cuts)


@pytest.mark.usefixtures("alone")
def test_a_rank_that_has_built_its_stage_keeps_the_whole_model() -> None:
    def left(package: Any, build: Callable[[Any], Any]) -> set[str]:
        """The parameters of the model that are still there when only a stage is held."""
        model = _linears()
        seen = {name: weakref.ref(value) for name, value in model.named_parameters()}
        stage = build(_cut(package, model))
        del model
        gc.collect()
        alive = {name for name, value in seen.items() if value() is not None}
        assert stage is not None  # all this time
        return alive

    everything = {f"{number}.{name}" for number in range(RANKS) for name in ("weight", "bias")}
    assert left(theirs, lambda pipe: pipe.build_stage(1, CPU)) == everything
    for rank in range(RANKS):
        alive = left(ours, lambda pipe, rank=rank: pipe.build_stage(rank))
        assert alive == {f"{rank}.weight", f"{rank}.bias"}


class LiveBytes(TorchDispatchMode):
    """How many bytes the tensors take that were made while it is on.

    Args:
        of_caller: tensors that are the caller's, and count for nothing.

    Attributes:
        peak: the most at once.
    """

    def __init__(self, *of_caller: Tensor) -> None:
        super().__init__()
        self._of_caller = {value.untyped_storage()._cdata for value in of_caller}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._of_caller:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """What they take at present."""
        self._live = {key: storages for key, storages in self._live.items() if not storages[0].expired()}
        return sum(size for _, size in self._live.values())


@dataclass(frozen=True)
class Found:
    """Bytes on one rank: the most in a step, and what is left after it."""

    peak: int
    left: int


def _bytes(
    comm: Comm, module: nn.Module, microbatches: int, step: Callable[..., Any], *, train: bool
) -> Found:
    x = torch.ones(ROWS * microbatches, WIDTH)
    args = (x,) if comm.rank == 0 else ()
    keywords: dict[str, Any] = {"target": x} if train and comm.rank == RANKS - 1 else {}
    if train:
        keywords["return_outputs"] = False
    with LiveBytes(x, *module.parameters()) as live:
        for _ in range(2):  # what is made once is there from now on; ranks compare their first two batches
            step(*args, **keywords)
        gc.collect()
        live.peak = 0
        step(*args, **keywords)
    gc.collect()
    return Found(live.peak, live.now())


def _ours(comm: Comm, pickled: bytes, microbatches: int, *, train: bool) -> Found:
    stage = pickle.loads(pickled).build_stage(comm.rank, comm=comm)
    schedule = ours.Schedule1F1B(stage, microbatches, functional.mse_loss)
    step = schedule.step if train else schedule.eval
    return _bytes(comm, stage.module, microbatches, step, train=train)


def _theirs(comm: Comm, microbatches: int) -> Found:
    module = _linears()[comm.rank]
    stage = theirs.PipelineStage(module, comm.rank, RANKS, CPU)
    schedule = theirs.Schedule1F1B(stage, microbatches, loss_fn=functional.mse_loss)
    return _bytes(comm, module, microbatches, schedule.step, train=True)


def _measure(comm: Comm, pickled: bytes) -> dict[str, list[Found]]:
    """With few and with many microbatches."""
    torch.set_num_threads(1)
    _ours(comm, pickled, FEW, train=True)  # one trailer is kept for all messages that lie alike
    return {
        "training": [_ours(comm, pickled, microbatches, train=True) for microbatches in (FEW, MANY)],
        "evaluation": [_ours(comm, pickled, microbatches, train=False) for microbatches in (SOME, MANY)],
        "theirs": [_theirs(comm, microbatches) for microbatches in (FEW, MANY)],
    }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, list[Found]]]:
    """What three processes found."""
    return ProcessWorld(RANKS).run(_measure, pickle.dumps(_cut(ours, _linears())))


ByRank = list[dict[str, list[Found]]]


def test_receive_buffers_grow_with_the_number_of_microbatches_and_stay_after_a_step(by_rank: ByRank) -> None:
    for rank, measured in enumerate(by_rank):
        few, many = measured["theirs"]
        neighbours = 1 + (0 < rank < RANKS - 1)  # that it receives from
        assert many.left - few.left >= neighbours * (MANY - FEW) * MESSAGE
        assert many.peak - few.peak >= neighbours * (MANY - FEW) * MESSAGE


def received_by(rank: int, *, train: bool) -> int:
    """How many messages a rank receives for a microbatch."""
    return (rank > 0) + (train and rank < RANKS - 1)


def test_a_step_leaves_nothing_but_gradients(by_rank: ByRank) -> None:
    gradients = (WIDTH * WIDTH + WIDTH) * 4
    for rank, measured in enumerate(by_rank):
        seed = 4 * (rank == RANKS - 1)  # what the backward pass of a loss starts from
        trailers = [received_by(rank, train=True) * count * TRAILER for count in (FEW, MANY)]
        assert [one.left for one in measured["training"]] == [gradients + seed + size for size in trailers]
        trailers = [received_by(rank, train=False) * count * TRAILER for count in (SOME, MANY)]
        assert [one.left for one in measured["evaluation"]] == trailers


def test_the_peak_of_a_training_step_is_the_same_for_16_and_64_microbatches(by_rank: ByRank) -> None:
    for rank, measured in enumerate(by_rank):
        few, many = measured["training"]
        losses = 4 * (rank == RANKS - 1)  # one number each, which the caller may ask for
        assert many.peak == few.peak + (losses + received_by(rank, train=True) * TRAILER) * (MANY - FEW)


def test_the_peak_of_an_evaluation_is_the_same_for_32_and_64_microbatches(by_rank: ByRank) -> None:
    """Up to sixteen messages are kept that nobody has answered."""
    for rank, measured in enumerate(by_rank):
        some, many = measured["evaluation"]
        results = 2 * MESSAGE * (rank == RANKS - 1)  # of each microbatch, and put together
        trailers = received_by(rank, train=False) * TRAILER
        assert many.peak == some.peak + (results + trailers) * (MANY - SOME)
    assert by_rank[0]["evaluation"][1].peak == 17 * MESSAGE
