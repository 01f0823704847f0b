"""Real processes for tests: the same ``run(fn, *args)`` as `InProcessWorld`, over gloo on loopback."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.runtime import ProcessGroupComm

LIMIT_S = 30.0
"""After this many seconds a test kills what is left and fails."""

_ON_GPU = os.environ.get("CUDA_VISIBLE_DEVICES") != "" and torch.cuda.is_available()
_CONTEXT: Any = multiprocessing.get_context("spawn" if _ON_GPU else "forkserver")
# Processes are forked off a server that has the imports done.
_CONTEXT.set_forkserver_preload(
    [
        "partita.ddp",
        "partita.pipelining",
        "torch._inductor.compile_fx",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor",
        "torch.export._trace",
        "torch.nn.parallel",
        "transformers.trainer",  # left out where it is not installed
        "tests.rare_collections",  # the last one
    ]
)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this machine that a process may listen on within the block, and that nothing else is given.

    A port that is free now may be another process's own end of a connection by the time that somebody wants
    to listen on it. This one is bound, but not listened on: the system keeps it, and lets whoever sets
    ``SO_REUSEADDR``, as a `torch.distributed.TCPStore` does, listen on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Another limit in this block, for processes that compile, or do many things in one launch."""
    global LIMIT_S
    before, LIMIT_S = LIMIT_S, seconds
    try:
        yield
    finally:
        LIMIT_S = before


@dataclass(frozen=True)
class Ending:
    """How one process ended: its exit code, what it returned or the error it raised, and when (seconds after
    the start).
    """

    exitcode: int | None
    result: Any = None
    error: BaseException | None = None
    text: str = ""
    at_s: float = 0.0


def _body(
    rank: int,
    size: int,
    path: str,
    started: float,
    pipe: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str = "gloo",
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # NCCL refuses two ranks on one GPU of a host: so each says that it is on another one.
    os.environ.update(NCCL_HOSTID=f"host of rank {rank}", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        dist.init_process_group(backend, store=dist.FileStore(path, size), rank=rank, world_size=size)
        with ProcessGroupComm.from_group() as comm:
            result = fn(comm, *args)
        pipe.send(Ending(0, result=result, at_s=time.monotonic() - started))
    except Exception as error:
        pipe.send(Ending(0, error=error, text=traceback.format_exc(), at_s=time.monotonic() - started))


def _script(rank: int, size: int, _path: str, started: float, pipe: Any, script: str, port: int) -> None:
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.chdir(Path(script).parent)
    sys.argv = [script]
    try:
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(script, run_name="__main__")
        pipe.send(Ending(0, result=printed.getvalue(), at_s=time.monotonic() - started))
    except Exception as error:
        pipe.send(Ending(0, error=error, text=traceback.format_exc(), at_s=time.monotonic() - started))


def script_endings(size: int, script: Path) -> list[Ending]:
    """Runs a script in its folder in `size` processes, with the environment that torchrun gives it. Each
    ending's result is what the script printed.
    """
    with reserved_port() as port:
        return endings_of(size, _script, str(script), port)


def endings(size: int, fn: Callable[..., Any], *args: Any) -> list[Ending]:
    """Calls ``fn(comm, *args)`` in `size` processes and tells how each ended. None outlives the call."""
    return endings_of(size, _body, fn, args)


def _begin(
    body: Callable[..., None], rank: int, size: int, path: str, started: float, pipe: Any, *args: Any
) -> None:
    # A process that does not end says where it stands.
    with open(_stacks_file(path, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks)
        body(rank, size, path, started, pipe, *args)


def _stacks_file(path: str, rank: int) -> Path:
    return Path(path).with_name(f"stacks of rank {rank}")


def _stands_at(process: Any, stacks: Path) -> str:
    """The stacks of all threads of a process that should have ended."""
    if process.exitcode is not None or not stacks.exists():
        return f"{process.name}: exit code {process.exitcode}"
    os.kill(process.pid, signal.SIGUSR2)
    deadline = time.monotonic() + 5.0
    before = -1
    while time.monotonic() < deadline and (size := stacks.stat().st_size) != before:
        before = size or -1
        process.join(0.2)
    return f"{process.name}:\n{stacks.read_text()}"


@cache
def _warm_up() -> None:
    """Have the server's imports done before any clock starts: on a busy machine they take half a minute."""
    if _ON_GPU:
        return
    process = _CONTEXT.Process()  # of which nothing is asked
    process.start()
    process.join()


def endings_of(size: int, body: Callable[..., None], *args: Any, folder: str | None = None) -> list[Ending]:
    """Calls ``body(rank, size, path, started, pipe, *given)`` in `size` processes, each of which sends its
    `Ending` through the pipe.

    Args:
        folder: that ``path`` is in; a temporary one if not given.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return endings_of(size, body, *args, folder=temporary)
    _warm_up()
    started = time.monotonic()
    path = str(Path(folder) / "store")
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
    processes = []
    for rank, (_, there) in enumerate(pipes):
        own = (body, rank, size, path, started, there)
        processes.append(_CONTEXT.Process(target=_begin, args=(*own, *args), daemon=True))
    for process in processes:
        process.start()
    for _, there in pipes:
        there.close()
    try:
        return [_collect(here, process, started) for (here, _), process in zip(pipes, processes, strict=True)]
    except AssertionError as error:
        for rank, process in enumerate(processes):
            error.add_note(_stands_at(process, _stacks_file(path, rank)))
        raise
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(here: Any, process: Any, started: float) -> Ending:
    remaining = LIMIT_S - (time.monotonic() - started)
    if not here.poll(max(0.0, remaining)):
        raise AssertionError(f"{process.name} still runs after {LIMIT_S} s")
    try:
        ending = here.recv()
    except EOFError:
        process.join(5.0)
        return Ending(process.exitcode, at_s=time.monotonic() - started)
    process.join(10.0)
    if process.exitcode is None:
        raise AssertionError(f"{process.name} has raised or returned, but does not end")
    return ending


class ProcessWorld:
    """`InProcessWorld` with a process a rank.

    Args:
        backend: of the default group.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        self.backend = backend

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        ends = endings_of(self.size, _body, fn, args, self.backend)
        for ending in ends:
            if ending.error is not None:
                raise ending.error
        return [ending.result for ending in ends]
