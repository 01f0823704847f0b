"""Under every schedule, a pipeline equals the uncut model bit for bit."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.pipelining.models import CALLED, CASES, PLAIN, REUSED, SKIP, TRANSFORMER, WIDTH, Case, Noisy
from tests.pipelining.running import Record, assert_same, cut, errors_of, piped, train, uncut
from tests.runtime.worlds import ProcessWorld
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class as get_their_class

from partita.errors import PeerFailed, ScheduleError
from partita.pipelining import get_schedule_class
from partita.pipelining.schedules import CustomSchedule, PipelineSchedule
from partita.pipelining.stages import Stage
from partita.pipelining.steps.running.program import receives_ahead
from partita.planning import ActionKind, get_schedule, loop_placement, lower, schedule_names, v_placement
from partita.runtime import Comm, InProcessComm, InProcessWorld, Tracer

CONSTANTS = next(case for case in CASES if case.name == "constants")
ALL = tuple(name for name in schedule_names() if name != "ForwardOnly")
VS = tuple(name for name in ALL if get_schedule(name).shape == "V")
TORCHS = tuple(name for name in ALL if name not in {"ZBH1", "ZBH2", "ZB2p", "VHalf", "VMin"})


def _placement(name: str, ranks: int, stages: int) -> tuple[int, ...]:
    return v_placement(stages, ranks) if name in VS else loop_placement(stages, ranks)


def _one_step(runner: Any, modules: Sequence[nn.Module], case: Case, record: Record) -> None:
    """What `train` does, in short."""
    args, kwargs, target = case.data(8)
    losses: list[Tensor] = []
    record.outputs.append(runner.step(*args, target=target, losses=losses, **kwargs))
    record.losses.append(losses)
    for module in modules:
        record.note(module)


@pytest.mark.parametrize("case", [case for case in CASES if len(case.after) == 3], ids=lambda case: case.name)
def test_four_stages_on_two_ranks(case: Case) -> None:
    run = train if case in (TRANSFORMER, SKIP) else _one_step
    expected = uncut(case, run=run)
    for name in ALL:
        records = piped(cut(case, 4), case, get_schedule_class(name), 4, _placement(name, 2, 4), run)
        assert_same(records, expected)


@pytest.mark.parametrize("case", [REUSED, CALLED, CONSTANTS], ids=lambda case: case.name)
@pytest.mark.parametrize("name", [name for name in ALL if name not in VS])
def test_stages_in_unequal_numbers(case: Case, name: str) -> None:
    stages = len(case.after) + 1
    placement = (0, 1, 0)[:stages]
    assert_same(piped(cut(case, stages), case, get_schedule_class(name), placement=placement), uncut(case))


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (1, 0, 2, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("case", [TRANSFORMER, SKIP], ids=lambda case: case.name)
def test_a_split_backward_on_any_placement(case: Case, placement: tuple[int, ...]) -> None:
    kind = get_schedule_class("InterleavedZeroBubble")
    assert_same(piped(cut(case, 4), case, kind, placement=placement), uncut(case))


DEEP = Case(
    "deep transformer",
    lambda: Noisy(7),
    ("embedding", *(f"blocks.{number}" for number in range(6))),
    TRANSFORMER.batch,
    TRANSFORMER.loss,
)
"""Eight stages: a tied embedding at both ends, dropout, attention."""


class Skips(nn.Module):
    """Eight layers, three of them frozen; one value is used by three later stages, another skips from the
    first to the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        for number in (2, 3, 6):
            self.layers[number].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.layers[0](x)
        h = second = self.layers[1](h).tanh()
        for number in range(2, 7):
            h = self.layers[number](h).relu() + second * (number % 2)
        return self.layers[7](h) * first


SKIPS = Case("skips", Skips, tuple(f"layers.{number}" for number in range(7)))
BY_NAME = {case.name: case for case in (*CASES, SKIPS)}


@pytest.mark.parametrize(
    "case", [pytest.param(DEEP, marks=pytest.mark.dear), SKIPS], ids=[DEEP.name, SKIPS.name]
)
def test_eight_stages_on_four_ranks(case: Case) -> None:
    microbatches = 8
    pipe, reference = cut(case, 8, 1), uncut(case, microbatches, _one_step)
    for name in ALL if case is SKIPS else ("ZBVZeroBubble",):
        placement = _placement(name, 4, 8)
        records = piped(pipe, case, get_schedule_class(name), microbatches, placement, _one_step)
        assert_same(records, reference)


# --- over processes ---


_LOOP, _V = loop_placement(4, 2), v_placement(4, 2)
OVER_PROCESSES = [
    ("LoopedBFS", "transformer", _LOOP),
    ("Interleaved1F1B", "transformer", _LOOP),
    ("InterleavedZeroBubble", "transformer", _LOOP),
    ("ZBVZeroBubble", "transformer", _V),
    ("DualPipeV", "transformer", _V),
    ("ZBH1", "transformer", _LOOP),
    ("ZBH2", "transformer", _LOOP),
    ("ZB2p", "transformer", _LOOP),
    ("VHalf", "transformer", _V),
    ("VMin", "transformer", _V),
    ("LoopedBFS", "skips", loop_placement(8, 2)),
    ("Interleaved1F1B", "skips", loop_placement(8, 2)),
    ("InterleavedZeroBubble", "skips", loop_placement(8, 2)),
    ("ZBVZeroBubble", "skips", _V),
    ("DualPipeV", "skips", _V),
    ("LoopedBFS", "no parameters", _LOOP),
    ("Interleaved1F1B", "no parameters", _V),  # the second rank trains nothing
    ("ZBVZeroBubble", "no parameters", _V),
    ("VHalf", "no parameters", _V),
    ("DualPipeV", "no parameters", _V),
    ("LoopedBFS", "called twice", (0, 1, 0)),
    ("Interleaved1F1B", "called twice", (0, 0, 1)),
    ("InterleavedZeroBubble", "called twice", (1, 0, 1)),
]
"""What is done in one launch of two processes: schedule, model, the rank of each stage."""


def _train_all(comm: Comm, pickled: bytes) -> bytes:
    torch.set_num_threads(1)
    records, pipes = [], pickle.loads(pickled)
    for kind, name, placement in OVER_PROCESSES:
        pipe, record = copy.deepcopy(pipes[name, len(placement)]), Record()
        stages = [
            pipe.build_stage(stage, comm=comm) for stage, rank in enumerate(placement) if rank == comm.rank
        ]
        schedule = get_schedule_class(kind)(stages, 4, BY_NAME[name].loss)
        train(schedule, [stage.module for stage in stages], BY_NAME[name], record)
        records.append(record)
    return pickle.dumps(records)


@pytest.fixture(scope="module")
def by_rank() -> list[list[Record]]:
    """What both processes found, run by run."""
    wanted = {(name, len(placement)) for _, name, placement in OVER_PROCESSES}
    pipes = {(name, stages): cut(BY_NAME[name], stages) for name, stages in sorted(wanted)}
    return [pickle.loads(pickled) for pickled in ProcessWorld(2).run(_train_all, pickle.dumps(pipes))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    range(len(OVER_PROCESSES)),
    ids=[f"{kind} {name} {placement}" for kind, name, placement in OVER_PROCESSES],
)
def test_processes_with_several_stages_equal_the_uncut_model(
    number: int, by_rank: list[list[Record]]
) -> None:
    expected = uncut(BY_NAME[OVER_PROCESSES[number][1]])
    assert_same([records[number] for records in by_rank], expected)


# --- what is refused, and what fails ---


@pytest.mark.parametrize("name", VS)
def test_a_placement_that_a_schedule_can_not_serve_says_what_to_build(name: str) -> None:
    def body(comm: Comm) -> None:
        stages = [cut(PLAIN, 4).build_stage(2 * index + comm.rank, comm=comm) for index in range(2)]
        get_schedule_class(name)(stages, 4, PLAIN.loss)

    for error in errors_of(2, body):
        assert isinstance(error, ScheduleError)
        text = (
            r"with the placement \(0, 1, 0, 1\): .* build stages r and 3 - r on rank r, or take Interleaved"
        )
        assert re.search(text, str(error))


def test_dualpipe_with_fewer_microbatches_than_stages_is_refused() -> None:
    def body(comm: Comm) -> None:
        stages = [cut(PLAIN, 4).build_stage(stage, comm=comm) for stage in (comm.rank, 3 - comm.rank)]
        get_schedule_class("DualPipeV")(stages, 3, PLAIN.loss)

    for error in errors_of(2, body):
        assert "DualPipeV with 3 microbatches on 4 stages: give at least 4" in str(error)


@pytest.mark.parametrize("half", ["I", "W"])
def test_a_failure_in_half_a_backward_pass_is_named_on_every_rank(half: str) -> None:
    case = PLAIN
    pipe = cut(case, 4)

    def body(comm: Comm) -> None:
        own = copy.deepcopy(pipe)
        stages = [own.build_stage(stage, comm=comm) for stage in (comm.rank, 3 - comm.rank)]
        if comm.rank == 1:  # stages 1 and 2
            _fail_in(stages[1].module, half)
        args, _, target = case.data(8)
        schedule = get_schedule_class("ZBVZeroBubble")(stages, 4, case.loss)
        try:
            schedule.step(*args, target=target)
        finally:
            assert all(stage.in_flight == 0 for stage in stages)

    first, second = errors_of(2, body)
    assert isinstance(first, PeerFailed)
    assert re.search(rf"rank 1 failed in stage 2, microbatch 1, action 2{half}1: .*not finite", str(first))
    assert isinstance(second, ValueError)
    assert second.__notes__ == [f"(rank 1, stage 2, microbatch 1, action 2{half}1)"]


def _fail_in(module: nn.Module, half: str) -> None:
    """The second time that a half backward pass goes through."""
    calls = itertools.count()

    def fail(*_: Any) -> None:
        if next(calls) == 1:
            raise ValueError("the gradient is not finite")

    def watch(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        inputs[0].register_hook(fail)

    if half == "I":
        module.register_forward_pre_hook(watch)
    else:
        next(module.parameters()).register_post_accumulate_grad_hook(fail)


def test_a_tracer_records_both_halves_and_the_parts_of_an_overlap() -> None:
    def body(comm: Comm) -> set[str]:
        own = copy.deepcopy(cut(PLAIN, 4))
        stages = [own.build_stage(stage, comm=comm) for stage in (comm.rank, 3 - comm.rank)]
        tracer = Tracer(comm.rank)
        schedule = get_schedule_class("DualPipeV")(stages, 6, PLAIN.loss, tracer=tracer)
        args, _, target = PLAIN.data(12)
        schedule.step(*args, target=target)
        parts = {str(part) for rank, part in schedule.schedule().passes() if rank == comm.rank}
        assert parts <= {event.name for event in tracer.events}
        return {event.name[1] for event in tracer.events if event.category == "compute"}

    assert InProcessWorld(2).run(body) == [{"F", "B", "I", "W"}] * 2


# --- one's own ---


def _trained(comm: Comm, make: Callable[[list[Stage]], PipelineSchedule], ranks: tuple[int, ...]) -> Record:
    own = copy.deepcopy(cut(SKIP, len(ranks)))
    stages = [own.build_stage(stage, comm=comm) for stage, rank in enumerate(ranks) if rank == comm.rank]
    record = Record()
    train(make(stages), [stage.module for stage in stages], SKIP, record)
    return record


def test_a_schedule_of_ones_own_runs_from_its_text() -> None:
    # torch's files look like this; a rank may delay weights and mix whole and split backward passes
    text = "0F0,0F1,0F2,0F3,,0I0,0I1,0W0,0W1,0B2,0B3\n,1F0,1F1,1F2,1F3,1I0,1W0,1I1,1W1,1B2,1B3\n"
    records = InProcessWorld(2).run(
        lambda comm: _trained(comm, lambda stages: CustomSchedule(stages, text, SKIP.loss), (0, 1))
    )
    assert_same(records, uncut(SKIP))


def test_a_lowered_schedule_keeps_its_messages_or_gets_those_of_the_model() -> None:
    neighbours = lower(get_schedule("1F1B")(3, 4))  # knows nothing of this model's skips

    def make(stages: list[Stage]) -> PipelineSchedule:
        schedule = CustomSchedule(stages, neighbours.to_csv(), SKIP.loss)
        again = CustomSchedule(stages, schedule.schedule(), SKIP.loss)
        assert again.schedule() == schedule.schedule() != neighbours
        return again

    assert_same(InProcessWorld(3).run(lambda comm: _trained(comm, make, (0, 1, 2))), uncut(SKIP))


def test_actions_on_whole_stages_call_the_stages_hooks() -> None:
    text = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n"

    def body(comm: Comm) -> list[str]:
        called: list[str] = []
        stage = copy.deepcopy(cut(PLAIN, 1)).build_stage(0, comm=comm)
        stage.hooks[ActionKind.UNSHARD] = lambda: called.append("gather")
        stage.hooks[ActionKind.REDUCE_GRAD] = lambda: called.append("reduce")
        args, _, target = PLAIN.data(2)
        CustomSchedule(stage, text, PLAIN.loss).step(*args, target=target)
        return called

    assert InProcessWorld(1).run(body) == [["gather", "reduce"]]


def test_a_schedule_for_other_stages_or_ranks_is_refused() -> None:
    def body(text: str, comm: Comm) -> None:
        CustomSchedule(cut(PLAIN, 2).build_stage(comm.rank, comm=comm), text, PLAIN.loss)

    for error in errors_of(2, partial(body, "1F0,1B0\n0F0,0B0\n")):
        assert "has stage 0 on rank 1, but it was built on rank 0: build it there, or move" in str(error)
    for error in errors_of(2, partial(body, "0F0,0B0,2F0,2B0\n1F0,1B0\n")):
        assert "is for 3 stages, but the model was cut into 2: cut it into as many" in str(error)


@pytest.mark.parametrize("name", TORCHS)
def test_classes_are_found_in_any_case_and_take_torchs_arguments(name: str) -> None:
    kind = get_schedule_class(f"schedule{name.lower()}")
    theirs = get_their_class(name)
    assert kind.__name__ == theirs.__name__
    wanted, ours = (list(inspect.signature(cls).parameters) for cls in (theirs, kind))
    assert ours[: len(wanted)] == wanted


@pytest.mark.parametrize("name", [name for name in ALL if name not in TORCHS])
def test_classes_that_torch_has_not_take_the_same_arguments(name: str) -> None:
    kind, known = get_schedule_class(f"schedule{name.lower()}"), get_schedule_class("ZBVZeroBubble")
    assert kind.__name__ == f"Schedule{name}"
    assert list(inspect.signature(kind).parameters) == list(inspect.signature(known).parameters)


@pytest.mark.parametrize("name", ["ZBH1", "ZBH2", "ZB2p"])
def test_a_zero_bubble_schedule_with_one_stage_a_rank(name: str) -> None:
    found = piped(cut(SKIP, 4, 1), SKIP, get_schedule_class(name), 8, (0, 1, 2, 3))
    assert_same(found, uncut(SKIP, 8))


def test_deferred_receives_are_posted_right_before_they_are_needed() -> None:
    actions = get_schedule("1F1B")(2, 4)
    row = lower(actions).actions(1)
    assert receives_ahead(row, 0) == row
    ahead = [str(action) for action in receives_ahead(row, 1) if action.is_compute or action.is_receive]
    assert ahead[:5] == ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1F1"]


def test_received_values_are_freed_with_their_last_user() -> None:
    """Room follows what is in flight, not the number of microbatches."""
    alive, most = weakref.WeakSet(), [0]

    class Watched(InProcessComm):
        def recv_together(self, buffers: Sequence[Tensor], src: int, tags: Sequence[int]) -> Any:
            alive.update(buffer.untyped_storage() for buffer in buffers[:-1])  # without the trailer
            most[0] = max(most[0], len(alive))
            return super().recv_together(buffers, src, tags)

    def body(comm: Comm) -> None:
        comm.__class__ = Watched
        own = copy.deepcopy(pipe)
        schedule = get_schedule_class("1F1B")(own.build_stage(comm.rank, comm=comm), 32, PLAIN.loss)
        args, _, target = PLAIN.data(32)
        schedule.step(*args, target=target)

    pipe = cut(PLAIN, 2, 1)
    InProcessWorld(2).run(body)
    assert 0 < most[0] < 12
