"""Processes that torch's elastic launcher starts, and a plain message where one of them fails."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from partita.errors import ExecutionError

__all__ = ["launch"]

_START_METHOD = "spawn"
"""A process of its own from the first import on: the pages of one that was forked are counted when they are
touched, as if the model needed them.
"""

_GRACE_S = 3
"""How long processes get to end by themselves once one has failed."""


def _grace() -> dict[str, Any]:
    """How long workers have to end, where torch lets one say so (2.11 does not)."""
    has_one = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
    return {"shutdown_timeout": _GRACE_S} if has_one else {}


def launch(function: Callable[..., Any], processes: int, *args: Any, name: str) -> dict[int, Any]:
    """Run ``function(*args)`` in so many processes on this machine, and wait for them.

    A free port is taken. When this call returns or raises, none of the processes is left.

    Args:
        function: importable by name; finds its rank as torchrun's workers do.
        name: what the processes are, for messages.

    Returns:
        By rank, what ``function`` returned there.

    Raises:
        ExecutionError: a process failed or was killed; the message names its rank.
        KeyboardInterrupt: somebody pressed Ctrl-C.
    """
    with (
        tempfile.TemporaryDirectory(prefix="partita-logs-") as logs,
        _worker_environment(),
        _quiet_launcher(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            start_method=_START_METHOD,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            **_grace(),
        )
        try:
            return dict(elastic_launch(config, function)(*args))
        except ChildFailedError as error:
            raise ExecutionError(_message(error, name)) from error
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            raise ExecutionError(
                f"the command got {error.sigval.name}; its processes have been ended"
            ) from error


def _message(error: ChildFailedError, name: str) -> str:
    rank, failure = min(error.failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode < 0:
        number = -failure.exitcode
        return (
            f"rank {rank} of the {name} was killed by {signal.Signals(number).name} (process {failure.pid}): "
            "if nobody did that on purpose, look for lack of memory in the system's log; the other ranks "
            "have been ended"
        )
    report = failure.message  # what the process has written down of its error, where it could
    text = str(report.get("message", report) if isinstance(report, dict) else report)
    return (
        f"rank {rank} of the {name} failed (process {failure.pid}, exit status {failure.exitcode}):\n"
        f"{text.strip()}"
    )


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the launcher, which logs a traceback for each process that it ends: `_message` says it all."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _worker_environment() -> Iterator[None]:
    """Give workers the loopback device and one thread each: equal thread counts give equal bits."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **_loopback()}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _loopback() -> dict[str, str]:
    for name in ("lo", "lo0"):
        if os.path.exists(f"/sys/class/net/{name}"):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}
