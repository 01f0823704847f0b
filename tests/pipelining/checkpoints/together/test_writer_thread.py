"""What is being written when a process ends: waited for where it ends in order, given up where it fails."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.runtime.worlds import Ending, endings_of
from torch import nn

from partita.pipelining.checkpoints import Snapshots, latest_checkpoint
from partita.pipelining.checkpoints.files.manifest_writer import ManifestWriter
from partita.pipelining.checkpoints.together.writer_thread import WriterThread


def test_it_calls_what_it_is_given_in_order_and_keeps_errors() -> None:
    thread, may_go, seen = WriterThread(), threading.Event(), list[int]()

    def first() -> str:
        may_go.wait(20.0)
        seen.append(1)
        return "written"

    def second() -> None:
        seen.append(2)
        raise OSError("full")

    one = thread.submit(first, with_others=False)
    two = thread.submit(second, with_others=True)
    assert not one.done()
    may_go.set()
    thread.finish()
    assert seen == [1, 2]
    assert one.result() == "written"
    with pytest.raises(OSError, match="full"):
        two.result()


def _never_closes(rank: int, size: int, path: str, started: float, pipe: Any, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    ends, write = threading.Event(), ManifestWriter.write_data

    def slow(writer: ManifestWriter, *args: Any) -> Any:
        ends.wait(20.0)
        return write(writer, *args)

    ManifestWriter.write_data = slow  # type: ignore[method-assign]
    Snapshots(folder).save(1, nn.Linear(2, 2))
    Finalize(None, ends.set, exitpriority=2)
    atexit.register(ends.set)  # Python 3.13 calls these first in a child
    pipe.send(Ending(0, at_s=time.monotonic() - started))


def test_a_snapshot_that_nobody_waits_for_is_whole_when_the_processes_have_ended(tmp_path: Path) -> None:
    endings_of(2, _never_closes, str(tmp_path))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000001"


FAILS = """
import sys, threading
import torch.distributed as dist
from torch import nn
from partita.pipelining.checkpoints import Snapshots
from partita.pipelining.checkpoints.files.manifest_writer import ManifestWriter

ManifestWriter.write_data = lambda *_: threading.Event().wait()
if sys.argv[2] == "with others":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Snapshots(sys.argv[1]).save(1, nn.Linear(2, 2))
raise ValueError("the loss is nan")
"""


def test_a_script_that_fails_ends_though_it_writes(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", FAILS, str(tmp_path), "with others"]
    ended = subprocess.run(command, env=environment, timeout=60, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "the loss is nan" in ended.stderr
    assert latest_checkpoint(tmp_path) is None
