"""A rank that raises, exits or is killed in a pipeline: all others learn which rank it was, in which action,
and why; nobody hangs, and every process ends.

The promise is 5 s. The tests print after how many seconds the others knew (``pytest -rP``).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from tests.pipelining.models import PLAIN, WIDTH
from tests.pipelining.running import cut
from tests.runtime import worlds
from tests.runtime.worlds import LIMIT_S, Ending, endings, reserved_port
from torch import Tensor, nn

from partita.errors import PeerFailed, SignatureMismatch
from partita.pipelining import Pipe, PipelineStage, Schedule1F1B, ScheduleGPipe, get_schedule_class
from partita.pipelining.stages import Stage
from partita.runtime import Comm, ProcessGroupComm

MICROBATCHES = 4

Place = Literal["forward", "loss", "tensor hook", "function", "weight hook", "optimizer"]
How = Literal["raise", "exit 0", "exit 3", "_exit", "kill", "leave a child"]

USER_CODE: dict[Place, str] = {
    "forward": "user_forward",
    "loss": "user_loss",
    "tensor hook": "user_tensor_hook",
    "function": "user_function",
    "weight hook": "user_weight_hook",
    "optimizer": "user_optimizer_hook",
}
"""The function that a traceback must show."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in the second step of a training.

    Attributes:
        kind: of the schedule.
        placement: the rank of each stage.
        place: where in the user's code.
        action: in which action, as messages name it: stage, kind, microbatch.
    """

    kind: str
    placement: tuple[int, ...]
    place: Place
    action: str
    how: How = "raise"

    @property
    def stage(self) -> int:
        return int(self.action[0])

    @property
    def microbatch(self) -> int:
        return int(self.action[2])

    @property
    def rank(self) -> int:
        return self.placement[self.stage]

    @property
    def where(self) -> str:
        if self.place == "optimizer":
            return "the comm's with block"
        return f"stage {self.stage}, microbatch {self.microbatch}, action {self.action}"

    def __str__(self) -> str:
        ranks = max(self.placement) + 1
        return f"{self.how} in {self.place}, {self.kind} on {ranks} ranks, {self.action}"


@dataclass
class Trap:
    """The user's code that goes wrong, in the microbatch that the fault names.

    Attributes:
        clock: a file that gets the time at which it does.
    """

    fault: Fault
    clock: Path
    armed: bool = False
    _calls: itertools.count[int] = field(default_factory=itertools.count)

    def is_next(self) -> bool:
        """Counts the calls, one a microbatch."""
        return next(self._calls) == self.fault.microbatch

    def spring(self) -> None:
        self.clock.write_text(str(time.monotonic()))
        if self.fault.how == "raise":
            raise ValueError("the activations are not finite")
        if self.fault.how == "leave a child" and os.fork() == 0:
            signal.alarm(int(LIMIT_S))  # ends it whatever happens
            self.clock.with_name("release").read_text()
            os._exit(0)
        if self.fault.how in {"kill", "leave a child"}:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.how == "_exit":
            os._exit(1)
        sys.exit(int(self.fault.how.removeprefix("exit ")))

    def user_forward(self, _module: nn.Module, _args: Any) -> None:
        if self.is_next():
            self.spring()

    def user_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.armed and self.fault.place == "loss" and self.is_next():
            self.spring()
        return PLAIN.loss(output, target)

    def user_tensor_hook(self, _gradient: Tensor) -> None:
        self.spring()

    def user_function(self) -> None:
        self.spring()

    def user_weight_hook(self, _gradient: Tensor) -> None:
        if self.is_next():
            self.spring()

    def user_optimizer_hook(self, *_: Any) -> None:
        self.spring()

    def mark(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Lets the backward pass of the microbatch fail, at the stage's output."""
        if not self.is_next():
            return output
        if self.fault.place == "function":
            return _BadBackward.apply(output, self)
        output.register_hook(self.user_tensor_hook)
        return output

    def set(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Arms it; returns what to remove."""
        self.armed = True
        place = self.fault.place
        if place == "forward":
            return module.register_forward_pre_hook(self.user_forward)
        if place in {"tensor hook", "function"}:
            return module.register_forward_hook(self.mark)
        if place == "weight hook":
            return next(module.parameters()).register_hook(self.user_weight_hook)
        return optimizer.register_step_pre_hook(self.user_optimizer_hook) if place == "optimizer" else None


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trap.user_function()
        return gradient, None


@dataclass(frozen=True)
class KnownFailure:
    """What a rank was told, and when."""

    error: Exception
    at_s: float


def _train(comm: Comm, fault: Fault, stages: list[Stage], clock: Path) -> None:
    """Three steps, of which the second one goes wrong."""
    trap = Trap(fault, clock)
    schedule = get_schedule_class(fault.kind)(stages, MICROBATCHES, trap.user_loss)
    parameters = [parameter for stage in stages for parameter in stage.module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    args, _, target = PLAIN.data(2 * MICROBATCHES)
    with ExitStack() as undo:
        for step in range(3):
            if step == 1 and comm.rank == fault.rank:
                module = next(stage.module for stage in stages if stage.index == fault.stage)
                handle = trap.set(module, optimizer)
                if handle is not None:
                    undo.callback(handle.remove)
            schedule.step(*args, target=target)
            optimizer.step()
            optimizer.zero_grad()


def _outcome(fault: Fault, pipe: Pipe | None, clock: Path) -> KnownFailure | None:
    """What this rank's training ends with; a comm of its own, since none outlives a failure."""
    try:
        with ProcessGroupComm.from_group() as comm:
            own = [stage for stage, rank in enumerate(fault.placement) if rank == comm.rank]
            try:
                _train(comm, fault, [_stage(fault, pipe, index, comm) for index in own], clock)
            finally:
                at_s = time.monotonic()
    except Exception as error:
        return KnownFailure(error, at_s)
    return None


def _stage(fault: Fault, pipe: Pipe | None, index: int, comm: Comm) -> Stage:
    """A stage of the pipe, or one made of a plain module, which takes no time to capture."""
    if pipe is not None:
        return pipe.build_stage(index, comm=comm)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return PipelineStage(module, index, len(fault.placement), torch.device("cpu"), comm=comm)


def _check(fault: Fault, failures: list[KnownFailure | None], clock: Path, text: str) -> None:
    """All ranks but the faulty one are told about it, by name."""
    failed = float(clock.read_text())
    for rank, failure in enumerate(failures):
        if rank == fault.rank:
            continue
        assert failure is not None, f"rank {rank} noticed nothing"
        assert isinstance(failure.error, PeerFailed), (rank, failure)
        assert failure.error.rank == fault.rank
        assert text in str(failure.error)
        if fault.how == "raise":
            assert USER_CODE[fault.place] in failure.error.traceback_text
    seconds = [failure and round(failure.at_s - failed, 2) for failure in failures]
    print(f"seconds until known ({fault}):", seconds)  # noqa: T201


# Errors. One launch for all faults of as many stages: after each, the ranks meet again with a new comm.

RAISES = (
    Fault("GPipe", (0, 1), "forward", "0F2"),
    Fault("GPipe", (0, 1), "loss", "1F1"),
    Fault("GPipe", (0, 1), "function", "0B0"),
    Fault("GPipe", (0, 1, 2), "forward", "1F2"),
    Fault("GPipe", (0, 1, 2), "tensor hook", "2B3"),
    Fault("1F1B", (0, 1), "forward", "1F0"),
    Fault("1F1B", (0, 1), "tensor hook", "1B2"),
    Fault("1F1B", (0, 1), "loss", "1F3"),
    Fault("1F1B", (0, 1), "optimizer", "0F0"),
    Fault("1F1B", (0, 1, 2), "function", "1B1"),
    Fault("1F1B", (0, 1, 2), "optimizer", "2F0"),
    Fault("Interleaved1F1B", (0, 1, 0, 1), "forward", "2F1"),
    Fault("Interleaved1F1B", (0, 1, 0, 1), "loss", "3F0"),
    Fault("Interleaved1F1B", (0, 1, 0, 1), "function", "1B2"),
    Fault("InterleavedZeroBubble", (0, 1, 0, 1), "loss", "3F2"),
    Fault("InterleavedZeroBubble", (0, 1, 0, 1), "tensor hook", "2I1"),
    Fault("InterleavedZeroBubble", (0, 1, 0, 1), "weight hook", "0W1"),
    Fault("InterleavedZeroBubble", (0, 1, 0, 1), "weight hook", "3W3"),
    Fault("ZBVZeroBubble", (0, 1, 1, 0), "forward", "1F1"),
    Fault("ZBVZeroBubble", (0, 1, 1, 0), "function", "2I0"),
    Fault("ZBVZeroBubble", (0, 1, 1, 0), "weight hook", "3W2"),
    Fault("ZBVZeroBubble", (0, 1, 1, 0), "weight hook", "1W0"),
)


@dataclass(frozen=True)
class Launch:
    """The faults of as many stages, what each rank was told in each, and the files with the times."""

    faults: tuple[Fault, ...]
    by_fault: list[list[KnownFailure | None]]
    clocks: list[Path]

    def of(self, fault: Fault) -> tuple[list[KnownFailure | None], Path]:
        number = self.faults.index(fault)
        return [failures[number] for failures in self.by_fault], self.clocks[number]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """From a number of stages to its `Launch`, made when it is first asked for."""

    @cache
    def launch(stages: int) -> Launch:
        faults = tuple(fault for fault in RAISES if len(fault.placement) == stages)
        folder = tmp_path_factory.mktemp("clocks")
        clocks = [folder / str(number) for number in range(len(faults))]
        ranks = max(faults[0].placement) + 1
        return Launch(faults, _results(endings(ranks, _raise_in_turn, faults, clocks)), clocks)

    return launch


def _raise_in_turn(_comm: Comm, faults: tuple[Fault, ...], clocks: list[Path]) -> list[KnownFailure | None]:
    torch.set_num_threads(1)
    pipe = cut(PLAIN, len(faults[0].placement))
    return [_outcome(fault, pipe, clock) for fault, clock in zip(faults, clocks, strict=True)]


def _results(ends: list[Ending]) -> list[Any]:
    for ending in ends:
        assert ending.error is None, ending.text
    return [ending.result for ending in ends]


@pytest.mark.parametrize("fault", RAISES, ids=str)
def test_an_error_in_user_code_reaches_all_with_rank_stage_microbatch_action_and_traceback(
    launches: Any, fault: Fault
) -> None:
    failures, clock = launches(len(fault.placement)).of(fault)
    _check(
        fault,
        failures,
        clock,
        f"rank {fault.rank} failed in {fault.where}: ValueError: the activations are not finite",
    )
    own = failures[fault.rank]
    assert own is not None
    assert isinstance(own.error, ValueError)
    if fault.place != "optimizer":
        assert own.error.__notes__ == [f"(rank {fault.rank}, {fault.where})"]


# Processes that end. Each takes a launch.

ENDS = (
    Fault("GPipe", (0, 1, 2), "forward", "1F2", "exit 0"),
    Fault("1F1B", (0, 1), "forward", "1F2", "exit 3"),
    Fault("1F1B", (0, 1), "tensor hook", "0B1", "exit 0"),
    Fault("InterleavedZeroBubble", (0, 1, 0, 1), "weight hook", "0W1", "exit 3"),
    Fault("GPipe", (0, 1), "forward", "0F2", "_exit"),
    Fault("1F1B", (0, 1, 2), "function", "2B1", "_exit"),
    Fault("GPipe", (0, 1), "forward", "0F2", "kill"),
    Fault("GPipe", (0, 1, 2), "forward", "1F2", "kill"),
    Fault("1F1B", (0, 1), "tensor hook", "1B2", "kill"),
    Fault("ZBVZeroBubble", (0, 1, 1, 0), "function", "2I1", "kill"),
    Fault("1F1B", (0, 1, 2), "optimizer", "0F0", "kill"),
    # A child, such as a worker of a DataLoader, held the connections: nobody noticed as long as it lived.
    Fault("1F1B", (0, 1), "forward", "1F2", "leave a child"),
)
EXIT_CODES: dict[How, int] = {
    "raise": 1,
    "exit 0": 0,
    "exit 3": 3,
    "_exit": 1,
    "kill": -signal.SIGKILL,
    "leave a child": -signal.SIGKILL,
}


def _end(_comm: Comm, fault: Fault, clock: Path) -> KnownFailure | None:
    torch.set_num_threads(1)
    failure = _outcome(fault, None, clock)
    if fault.how == "leave a child":
        clock.with_name("release").write_text("")
    return failure


@pytest.mark.parametrize("fault", ENDS, ids=str)
def test_a_process_that_ends_in_the_middle_of_a_training_is_named_on_every_other(
    tmp_path: Path, fault: Fault
) -> None:
    clock = tmp_path / "clock"
    os.mkfifo(tmp_path / "release")  # opens when a child waits for it and a rank lets it go
    ends = endings(max(fault.placement) + 1, _end, fault, clock)
    assert ends[fault.rank].exitcode == EXIT_CODES[fault.how]
    if fault.how in {"_exit", "kill", "leave a child"}:
        text = f"rank {fault.rank} died without a word"
    else:
        text = f"rank {fault.rank} failed in {fault.where}: SystemExit: {fault.how[-1]}"
    _check(fault, [ending.result for ending in ends], clock, text)


def _disagrees(comm: Comm) -> None:
    stage = cut(PLAIN, comm.size).build_stage(comm.rank, comm=comm)
    schedule = ScheduleGPipe(stage, 4, PLAIN.loss)
    args, _, target = PLAIN.data(8)
    (schedule.step if comm.rank == 0 else schedule.eval)(*args, target=target)


def test_ranks_that_disagree_about_a_step_both_learn_of_it() -> None:
    for ending in endings(2, _disagrees):
        assert isinstance(ending.error, (SignatureMismatch, PeerFailed)), ending
        assert "step() number 0 in train mode" in str(ending.error)
        assert "eval() number 0 in train mode" in str(ending.error)


# The ends of a process whose training stands in no `with` block.

SCRIPT = """
import faulthandler, json, os, sys, time
import torch, torch.distributed as dist
from partita.errors import PeerFailed
from partita.pipelining import PipelineStage, Schedule1F1B

def train(rank, files, size, port, failing, place, how):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    stage = PipelineStage(torch.nn.Linear(4, 4), rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.1)

    def user_code(*_):
        with open(files + ".failed", "w") as file:
            file.write(str(time.monotonic()))
        if how == "raise":
            raise ValueError("the gradients are not finite")
        sys.exit(int(how.removeprefix("exit ")))

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    schedule.step(x, target=y)
    if rank == failing:
        if place == "forward":
            stage.module.register_forward_hook(user_code)
        elif place == "optimizer":
            optimizer.register_step_pre_hook(user_code)
        else:
            user_code()
    try:
        for _ in range(3):
            optimizer.step()
            schedule.step(x, target=y)
    except PeerFailed:
        with open(f"{files}.{rank}.known", "w") as file:
            file.write(str(time.monotonic()))
        raise

torch.set_num_threads(1)
children = []
for number, case in enumerate(json.loads(sys.argv[2])):
    for rank in range(case["size"]):
        child = os.fork()
        if child == 0:  # from here on a main program of its own, which ends like any other
            files = f"{sys.argv[1]}/{number}"
            sys.stderr = open(f"{files}.{rank}.stderr", "w")
            faulthandler.dump_traceback_later(40, file=sys.stderr)  # before the test's patience ends
            train(rank, files, **case)
            sys.exit()
        children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


@dataclass(frozen=True)
class Script:
    """One that goes wrong in its second step, or before it. Rank 0 hosts the store."""

    size: int
    failing: int
    place: Literal["main program", "optimizer", "forward"]
    how: How
    text: str

    def __str__(self) -> str:
        return f"{self.how} in {self.place} on rank {self.failing} of {self.size}"


SCRIPTS = (
    Script(2, 1, "main program", "exit 0", "left while another rank still waited for it"),
    Script(2, 0, "main program", "exit 3", "left while another rank still waited for it"),
    Script(
        2, 1, "optimizer", "raise", "failed in the main program: ValueError: the gradients are not finite"
    ),
    Script(2, 0, "forward", "exit 3", "failed in stage 0, microbatch 0, action 0F0: SystemExit: 3"),
    Script(
        3, 0, "forward", "raise", "failed in stage 0, microbatch 0, action 0F0: ValueError: the gradients"
    ),
)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Runs them all at once; the folder with what they wrote, and the exit codes of each."""
    folder = tmp_path_factory.mktemp("scripts")
    with ExitStack() as ports:
        cases = [
            {
                "size": one.size,
                "port": ports.enter_context(reserved_port()),
                "failing": one.failing,
                "place": one.place,
                "how": one.how,
            }
            for one in SCRIPTS
        ]
        parent = ports.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, folder, json.dumps(cases)],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
                start_new_session=True,
            )
        )
        try:
            codes = iter(json.loads(parent.communicate(timeout=2 * LIMIT_S)[0]))
        except subprocess.TimeoutExpired as error:
            for path in sorted(folder.glob("*.stderr")):
                error.add_note(f"{path.name}:\n{path.read_text()}")
            raise
        finally:
            with suppress(ProcessLookupError):  # as it is where all have ended
                os.killpg(parent.pid, signal.SIGKILL)
    return folder, [[next(codes) for _ in range(one.size)] for one in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_that_ends_is_named_to_all(scripts: tuple[Path, list[list[int]]], script: Script) -> None:
    number = SCRIPTS.index(script)
    folder, codes = scripts[0], scripts[1][number]
    assert codes[script.failing] == EXIT_CODES[script.how]
    failed = float((folder / f"{number}.failed").read_text())
    seconds = []
    for rank in range(script.size):
        if rank == script.failing:
            continue
        stderr = (folder / f"{number}.{rank}.stderr").read_text()
        assert codes[rank] == 1
        assert f"PeerFailed: rank {script.failing} {script.text}" in stderr
        assert ("in user_code" in stderr) == ("failed in" in script.text)
        seconds.append(round(float((folder / f"{number}.{rank}.known").read_text()) - failed, 2))
    print(f"seconds until known ({script}):", seconds)  # noqa: T201


def _work(rank: int, how: How, folder: Path, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    schedule = Schedule1F1B(PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu")), 4, PLAIN.loss)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    schedule.step(x, target=y)
    if rank == 1:
        (folder / "clock").write_text(str(time.monotonic()))
        _user_worker(how)
    try:
        schedule.step(x, target=y)
    except PeerFailed as error:
        pipe.send(KnownFailure(error, time.monotonic()))


def _user_worker(how: How) -> None:
    if how == "raise":
        raise ValueError("the weights are not finite")
    sys.exit(int(how.removeprefix("exit ")))


@pytest.mark.parametrize(
    ("how", "text", "traceback"),
    [
        ("raise", "failed in the main program: ValueError: the weights are not finite", "_user_worker"),
        ("exit 3", "failed in the main program: SystemExit: 3", "_user_worker"),
        ("exit 0", "left while another rank still waited for it", ""),
    ],
)
def test_a_child_of_multiprocessing_that_ends_between_two_steps_is_named_with_its_traceback(
    tmp_path: Path, how: How, text: str, traceback: str
) -> None:
    context = worlds._CONTEXT
    here, there = context.Pipe(duplex=False)
    processes = [context.Process(target=_work, args=(rank, how, tmp_path, there)) for rank in range(2)]
    for process in processes:
        process.start()
    there.close()
    try:
        assert here.poll(LIMIT_S)
        failure = here.recv()
        for process in processes:
            process.join(LIMIT_S)
        assert [process.exitcode for process in processes] == [0, EXIT_CODES[how]]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert f"rank 1 {text}" in str(failure.error)
    if not (how == "exit 3" and sys.version_info >= (3, 13)):  # which keeps its code only
        assert traceback in failure.error.traceback_text
    failed = float((tmp_path / "clock").read_text())
    print(f"seconds until known ({how} in a child):", [round(failure.at_s - failed, 2)])  # noqa: T201
