"""Programs in flight: loops around one model whose stages are on several ranks, each with its own state.

::

    rank 0   A  B  C  D  A  B  C  D  A  ...      a call of a program needs its call before, so one program
    rank 1      A  B  C  D  A  B  C  D  ...      keeps one stage busy; as many programs as stages in flight
    rank 2         A  B  C  D  A  B  C  ...      keep all of them busy
    rank 3            A  B  C  D  A  B  ...
                      └ the programs run on the last rank: they are sent what the model returns, and what
                        they call it with next goes to rank 0
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from partita.errors import ArgumentError, ArgumentTypeError, ExecutionError
from partita.pipelining.blocks.decoding_pass import StageDecoder
from partita.pipelining.blocks.packet import first_packet
from partita.pipelining.blocks.stage import BlockStage
from partita.pipelining.blocks.stage_module import StageModule
from partita.pipelining.blocks.staying_state import StateChange, StayingState
from partita.pipelining.blocks.transfer import receive_bundle, send_bundle
from partita.pipelining.decoding.model_call import ModelCall, Program
from partita.pipelining.decoding.turn import Turn
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm, Handle, ProcessGroupComm, wait_all
from partita.runtime.one_at_a_time import one_at_a_time
from partita.runtime.publish_errors import publish_errors

__all__ = ["ProgramStatistics", "check_stage", "run_programs"]

_TAG = 1
_LARGEST_STATE = 2**20
"""Bytes of tensors that the objects of a first call may have; they are sent to all stages."""


@dataclass
class ProgramStatistics:
    """What one rank did.

    Attributes:
        calls: how many calls of the model its stage has run.
        state_bytes: the most memory that the tensors in staying objects had on this rank at once.
    """

    calls: int = 0
    state_bytes: int = 0


def run_programs(
    stage: Stage,
    programs: Iterable[Program],
    *,
    in_flight: int = 1,
    comm: Comm | None = None,
    on_report: Callable[[int, Any], object] | None = None,
    statistics: ProgramStatistics | None = None,
) -> list[Any] | None:
    """Run programs that call a model whose stages are on several ranks. Collective.

    A `Program` is a generator function's: the loop that would call the model, with ``yield ModelCall(...)``
    in place of each call. The programs run on the last rank, which is where the model's outputs are; those
    that other ranks are given are not started. The model runs without gradients, in evaluation mode.
    Up to ``in_flight`` programs take turns; the next one begins where one has ended.

    What a call does is, bit for bit, what the model does with the same arguments in one process, as long as
    its modules keep nothing in Python between calls but in the ``state`` of the calls. (Tensors that they
    keep in attributes of their own are noticed, where programs take turns, and refused.)

    Args:
        stage: this rank's, from ``pipeline(..., frontend="modules").build_stage(rank)``: one a rank.
        programs: the same number on every rank.
        in_flight: how many programs are under way at once; as many as there are stages keep all busy.
        comm: between the stages; None: the stage's own, or one over its process group.
        on_report: called on every rank with a program's number and the ``report`` of its call, as the call
            passes this rank.
        statistics: where to write what this rank did.

    Returns:
        On the last rank what each program returned, in order; None on the others.

    Raises:
        ArgumentError: a captured stage, or more than one stage a rank; a stage in training mode; state that
            is not empty, or is given after the first call.
        ExecutionError: the model uses a tensor that no stage has handed on, or keeps one in a module while
            several programs are in flight.
        PeerFailed: another rank failed.

    >>> from torch import nn
    >>> from partita.pipelining import SplitPoint, pipeline
    >>> from partita.pipelining.decoding import ModelCall, run_programs
    >>> from partita.runtime import InProcessWorld
    >>> class Sums(nn.Module):
    ...     def forward(self, x, memory):
    ...         memory["sum"] = memory.get("sum", 0) + x
    ...         return memory["sum"]
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second = Sums(), nn.Linear(2, 2)
    ...     def forward(self, x, memory):
    ...         return self.second(self.first(x, memory))
    >>> model, x = Model().eval(), torch.ones(1, 2)
    >>> pipe = pipeline(model, (x, {}), {}, {"second": SplitPoint.BEGINNING}, frontend="modules")
    >>> def program():
    ...     memory = {}
    ...     for _ in range(3):
    ...         y = yield ModelCall((x,), state={"memory": memory})
    ...     return y
    >>> def run(comm):
    ...     return run_programs(pipe.build_stage(comm.rank, comm=comm), [program()], comm=comm)
    >>> bool((InProcessWorld(2).run(run)[1][0] == model.second(3 * x)).all())
    True
    """
    comm = comm or stage.comm
    if comm is None:
        comm = stage.comm = ProcessGroupComm.from_group(stage.group)
    block_stage = check_stage(stage, comm)
    if in_flight < 1:
        raise ArgumentError(f"in_flight is {in_flight}: give at least 1")
    ring = _Ring(block_stage, comm, on_report or _ignore, statistics or ProgramStatistics())
    with one_at_a_time(comm, "run_programs()"), publish_errors(comm, "running programs"):
        if comm.rank == comm.size - 1:
            return _Driver(ring, in_flight).run(list(programs))
        _serve(ring)
    return None


def _ignore(program: int, report: Any) -> None:
    pass


def check_stage(stage: Stage, comm: Comm) -> BlockStage:
    """Return the stage, if it is one that can keep state, and that of this rank.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(stage, BlockStage) or not isinstance(stage.module, StageModule):
        kind = type(stage.module if isinstance(stage, BlockStage) else stage).__name__
        raise ArgumentTypeError(
            f"a {kind} can't keep state between calls, since its graph was captured for one call or it was "
            'wrapped: cut the model with pipeline(..., frontend="modules"), and give what build_stage() '
            "returns"
        )
    if stage.num_stages != comm.size or stage.index != comm.rank:
        raise ArgumentError(
            f"rank {comm.rank} of {comm.size} has stage {stage.index} of {stage.num_stages}: programs need "
            "one stage a rank, stage 0 on rank 0 and so on"
        )
    if stage.module.training:
        raise ArgumentError(
            "the stage is in training mode, in which dropout would be drawn: call stage.module.eval() first"
        )
    return stage


class _Ring:
    """This rank's place among the stages: its state for each program, and the messages to and from it."""

    def __init__(
        self,
        stage: BlockStage,
        comm: Comm,
        on_report: Callable[[int, Any], object],
        statistics: ProgramStatistics,
    ) -> None:
        self.comm = comm
        self.device = stage.device
        self.staying: dict[int, StayingState] = {}
        self._decoder = StageDecoder(cast("StageModule", stage.module))
        self._index = stage.index
        self._on_report = on_report
        self._statistics = statistics
        self._sends: dict[int, list[Handle]] = {}
        if comm.size > 1:
            pairs = [(rank, (rank + 1) % comm.size) for rank in range(comm.size)]
            comm.connect(pairs, self.device)

    def receive(self) -> Turn:
        """Wait for the next message from the rank before."""
        handles: list[Handle] = []
        turn = receive_bundle(self.comm, (self.comm.rank - 1) % self.comm.size, _TAG, self.device, handles)
        wait_all(handles)
        assert isinstance(turn, Turn)
        return turn

    def send(self, turn: Turn) -> None:
        """Start to send a message to the next rank. What was sent before of the same program has come round,
        so it has been received.
        """
        wait_all(self._sends.pop(turn.program, []))
        next_rank = (self.comm.rank + 1) % self.comm.size
        self._sends[turn.program] = send_bundle(self.comm, turn, next_rank, _TAG, self.device)

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        while self._sends:
            wait_all(self._sends.popitem()[1])

    def open(self, program: int, objects: dict[str, Any]) -> StayingState:
        """Begin with a program's staying objects."""
        self.staying[program] = StayingState(objects, self.device)
        return self.staying[program]

    def end(self, program: int) -> None:
        """Drop a program's staying objects, which have never been larger."""
        state_bytes = sum(staying.bytes() for staying in self.staying.values())
        self._statistics.state_bytes = max(self._statistics.state_bytes, state_bytes)
        self.staying.pop(program, None)

    def take(self, turn: Turn) -> None:
        """Enter what the message tells about other stages and programs."""
        for program in turn.ended:
            self.end(program)
        if turn.packet is None:
            return
        if turn.opened is not None and turn.program not in self.staying:
            self.open(turn.program, pickle.loads(turn.opened))
        staying = self.staying[turn.program]
        later = [changes for stage, changes in turn.before.items() if stage > self._index]
        for changes in later:  # those of earlier stages came with the call itself
            staying.apply(changes)
        if later and self._index == 0:  # other stages begin after what is before them in the call
            staying.begin()
        if turn.report is not None:
            self._on_report(turn.program, turn.report)

    def run(self, turn: Turn) -> tuple[Any, tuple[StateChange, ...]]:
        """Run this rank's part of the call."""
        assert turn.packet is not None
        staying, alone = self.staying[turn.program], len(self.staying) == 1
        result = self._decoder.run(turn.packet, staying, turn.changes, alone=alone)
        self._statistics.calls += 1
        return result.output, result.changes


def _serve(ring: _Ring) -> None:
    """Run this rank's part of each call that comes, until the last."""
    comm = ring.comm
    while True:
        turn = ring.receive()
        ring.take(turn)
        if turn.packet is not None:
            turn = turn.handed_on(comm.rank, *ring.run(turn))
        if turn.packet is not None or comm.rank < comm.size - 2:
            ring.send(turn)
        if turn.last:
            ring.finish()
            return


class _Driver:
    """The last rank: runs the programs, and its part of each call."""

    def __init__(self, ring: _Ring, in_flight: int) -> None:
        self._ring = ring
        self._in_flight = in_flight
        self._under_way: deque[tuple[int, Turn | None]] = deque()
        """The programs whose call is under way, with the call where there is only one rank."""
        self._ended: list[int] = []
        self._programs: list[Program] = []
        self._results: list[Any] = []

    def run(self, programs: list[Program]) -> list[Any]:
        """Run them all; return their results."""
        self._programs, self._results = programs, [None] * len(programs)
        ahead = iter(range(len(programs)))
        try:
            self._begin(ahead, self._in_flight)
            while self._under_way:
                program, turn = self._next_turn()
                self._ring.take(turn)
                output, changes = self._ring.run(turn)
                if not self._advance(program, output, {**turn.changes, self._ring.comm.rank: changes}):
                    self._begin(ahead, 1)
            self._stop()
        finally:
            for generator in programs:
                generator.close()
        return self._results

    def _begin(self, ahead: Iterator[int], count: int) -> None:
        """Start so many more programs, where there are any."""
        for program in ahead:
            count -= self._advance(program, None, {})
            if count == 0:
                return

    def _advance(self, program: int, output: Any, before: dict[int, tuple[StateChange, ...]]) -> bool:
        """Let a program go on to its next call, and send it off; False where the program has ended."""
        generator = self._programs[program]
        try:
            with torch.no_grad():
                call = generator.send(output)
        except StopIteration as end:
            self._results[program] = end.value
            self._ring.end(program)
            self._ended.append(program)
            return False
        turn = self._turn(program, call, before)
        self._ended.clear()
        if self._ring.comm.size > 1:
            self._ring.send(turn)
            self._under_way.append((program, None))
        else:
            self._under_way.append((program, turn))
        return True

    def _turn(self, program: int, call: ModelCall, before: dict[int, tuple[StateChange, ...]]) -> Turn:
        if not isinstance(call, ModelCall):
            raise ArgumentTypeError(
                f"program {program} yields a {type(call).__name__}: yield a ModelCall, with the model's "
                "arguments in it"
            )
        opened = None
        staying = self._ring.staying.get(program)
        if staying is None:
            opened = _pickled(call.state)
            self._ring.open(program, dict(call.state))
        else:
            _check_state(program, call, staying)
        packet = first_packet(call.args, call.kwargs, live=False)
        return Turn(program, packet, opened, before, {}, call.report, tuple(self._ended))

    def _next_turn(self) -> tuple[int, Turn]:
        program, turn = self._under_way.popleft()
        if turn is None:
            turn = self._ring.receive()
            assert turn.program == program
        return program, turn

    def _stop(self) -> None:
        """Tell the others that nothing follows."""
        if self._ring.comm.size > 1:
            self._ring.send(Turn(-1, None, ended=tuple(self._ended), last=True))
            self._ring.finish()


def _pickled(state: Any) -> bytes:
    size = StayingState(state, _CPU).bytes()
    if size > _LARGEST_STATE:
        raise ArgumentError(
            f"the state of a program's first call has {size:,} bytes of tensors, and it would be copied to "
            f"all stages: begin with empty state (at most {_LARGEST_STATE:,} bytes), and let calls fill it"
        )
    try:
        return pickle.dumps(dict(state), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises what __reduce__ raises
        raise ExecutionError(
            f"the state of a program's first call can't be sent to the other stages "
            f"({type(error).__name__}: {error}): give objects that can be pickled"
        ) from error


_CPU = torch.device("cpu")


def _check_state(program: int, call: ModelCall, staying: StayingState) -> None:
    for name, value in call.state.items():
        if staying.objects.get(name) is not value:
            raise ArgumentError(
                f"program {program} has {name!r} as state that its first call did not have: other stages "
                "have no such object. Make all of it before the first call"
            )
