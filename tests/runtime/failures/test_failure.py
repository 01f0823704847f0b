"""A rank that raises, leaves or is killed reaches every other rank as an error that names it, and every
process ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.runtime.worlds import LIMIT_S, Ending, endings, reserved_port

from partita._torch.distributed.groups import prefixed
from partita.errors import DeadlockError, PeerFailed
from partita.runtime import Comm, FailureRecord, ProcessGroupComm


def _raise_on_1_while_0_waits_for_1_and_2_for_0(comm: Comm) -> None:
    if comm.rank == 1:
        comm.recv_object(2)
        raise ValueError("the loss is not finite")
    if comm.rank == 2:
        comm.send_object("go", 1)
    comm.recv(torch.empty(4), (comm.rank + 1) % 3).wait()


def _check_peers(ends: list[Ending], failed: int, text: str) -> None:
    for rank, ending in enumerate(ends):
        if rank == failed:
            continue
        assert isinstance(ending.error, PeerFailed), (rank, ending)
        assert ending.error.rank == failed
        assert text in str(ending.error)
        assert "gloo/transport" not in ending.text  # "Connection reset by peer" came first, as if the reason
    print("seconds:", [round(ending.at_s, 2) for ending in ends])  # noqa: T201


def test_a_raising_rank_is_named_with_its_traceback_also_to_a_rank_that_waits_for_another() -> None:
    ends = endings(3, _raise_on_1_while_0_waits_for_1_and_2_for_0)
    assert isinstance(ends[1].error, ValueError)
    _check_peers(ends, 1, "rank 1 failed in the comm's with block: ValueError: the loss is not finite")
    for rank in (0, 2):
        error = ends[rank].error
        assert isinstance(error, PeerFailed)
        assert "_raise_on_1_while_0_waits_for_1_and_2_for_0" in error.traceback_text


def _raise_on_1_while_0_and_2_wait_for_each_other(comm: Comm) -> None:
    if comm.rank == 1:
        comm.recv_object(2)
        raise ValueError("nobody talks with me")
    if comm.rank == 2:
        comm.send_object("go", 1)
    comm.recv(torch.empty(4), 2 - comm.rank).wait()


def test_ranks_that_wait_only_for_living_ranks_learn_of_the_failure() -> None:
    ends = endings(3, _raise_on_1_while_0_and_2_wait_for_each_other)
    _check_peers(ends, 1, "ValueError: nobody talks with me")


def _kill_1_while_0_and_2_wait_for_each_other(comm: Comm) -> None:
    if comm.rank == 1:
        comm.recv_object(2)
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 2:
        comm.send_object("go", 1)
    comm.recv(torch.empty(4), 2 - comm.rank).wait()


def test_a_deadlock_stays_one_on_the_rank_that_hears_of_it_from_another() -> None:
    places = "rank 0 waits for rank 1 in a barrier, and rank 1 for rank 0 in a step"
    first = FailureRecord(0, "deadlock", summary=places).to_error()
    second = FailureRecord.of(0, first, "the main program").to_error()
    assert type(second) is type(first) is DeadlockError
    assert str(second) == str(first)
    assert places in str(first)


def test_a_killed_rank_is_named_to_all() -> None:
    ends = endings(3, _kill_1_while_0_and_2_wait_for_each_other)
    assert ends[1].exitcode == -signal.SIGKILL
    _check_peers(ends, 1, "rank 1 died without a word (killed?)")


def _exit_on_1(comm: Comm) -> None:
    if comm.rank == 1:
        comm.recv_object(0)
        sys.exit(3)
    comm.send_object("go", 1)
    comm.recv(torch.empty(4), 1).wait()


def test_sys_exit_inside_the_with_block_is_a_failure() -> None:
    ends = endings(2, _exit_on_1)
    assert ends[1].exitcode == 3
    _check_peers(ends, 1, "rank 1 failed in the comm's with block: SystemExit: 3")


def _close_on_1(comm: Comm) -> None:
    if comm.rank == 1:
        comm.recv_object(0)
        return
    comm.send_object("go", 1)
    comm.recv(torch.empty(4), 1).wait()


def test_a_rank_that_closes_while_another_waits_for_it_has_left() -> None:
    ends = endings(2, _close_on_1)
    _check_peers(ends, 1, "rank 1 left while another rank still waited for it")


def _fail_in_collectives(comm: Comm, kind: str) -> None:
    tensor = torch.ones(3)
    comm.all_reduce(tensor, (0, 1, 2)).wait()
    if comm.rank == 2:
        raise KeyError("weights")
    if kind == "all_reduce":
        comm.all_reduce(tensor, (0, 1, 2)).wait()
    elif kind == "new subset":
        comm.all_reduce(tensor, (comm.rank, 2)).wait()
    elif kind == "object":
        comm.recv_object(2)
    elif kind == "barrier":
        comm.barrier()
    else:
        comm.broadcast(tensor, 2).wait()


@pytest.mark.parametrize("kind", ["all_reduce", "new subset", "object", "barrier", "broadcast"])
def test_every_blocking_call_is_reached(kind: str) -> None:
    ends = endings(3, _fail_in_collectives, kind)
    _check_peers(ends, 2, "KeyError: 'weights'")


def _with_store_on(host: int, comm: Comm) -> ProcessGroupComm:
    """Another comm of the same ranks, whose store ends with one of them."""
    if comm.rank == host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = comm.all_gather_object(store.port if comm.rank == host else None)[host]
    if comm.rank != host:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    inner = ProcessGroupComm(prefixed(store, "inner"), comm.rank, comm.size, 20.0, use_nccl=False)
    inner.barrier()
    return inner


def _fail_on_0_which_hosts_the_store_and_ends(comm: Comm) -> None:
    inner = _with_store_on(0, comm)
    if comm.rank == 0:
        inner.fail(ValueError("the loss is not finite"), "step 3")
        inner.close()
        os._exit(0)  # `comm` hears no word of it: from here on it is not used
    if comm.rank == 1:
        while not inner.has_failed:  # computes: nothing that it waits for tells it
            torch.ones(50, 50).sum()
    inner.barrier()


def test_what_a_rank_said_is_heard_though_its_process_ends_at_once_and_hosts_the_store() -> None:
    ends = endings(3, _fail_on_0_which_hosts_the_store_and_ends)
    _check_peers(ends, 0, "rank 0 failed in step 3: ValueError: the loss is not finite")


def _kill_1_which_hosts_the_store(comm: Comm) -> None:
    inner = _with_store_on(1, comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    inner.recv(torch.empty(4), 1).wait()


def test_rank_0_does_not_take_itself_for_dead_where_another_process_hosted_the_store() -> None:
    ends = endings(2, _kill_1_which_hosts_the_store)
    _check_peers(ends, 1, "rank 1 died without a word (killed?)")


def test_a_stopped_host_of_the_store_holds_nobody_longer_than_the_limit(tmp_path: Path) -> None:
    """The others waited in the store, which has no limit: for minutes, with timeout_s=5."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with reserved_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(port)],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(3)
        ]
        try:
            texts = [process.communicate(timeout=2 * LIMIT_S)[0] for process in processes[1:]]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    for rank, text in enumerate(texts, 1):
        assert text.startswith("PeerFailed 0 rank 0 gives no sign of life: rank ")
        assert "has waited 2 s for it in recv from rank 0 (tag 0)" in text
        assert f"rank {rank} closed" in text


STOPPED = """
import os, signal, sys
import torch, torch.distributed as dist
from partita.runtime import ProcessGroupComm
rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
comm = ProcessGroupComm.from_group(timeout_s=2.0)
if rank == 0:
    for other in (1, 2):
        comm.recv_object(other)  # so nobody is still on the way into what follows
    os.kill(os.getpid(), signal.SIGSTOP)
comm.send_object("here", 0)
try:
    comm.recv(torch.empty(4), 0).wait()
except Exception as error:
    print(type(error).__name__, error.rank, error)
comm.close()
print(f"rank {rank} closed", flush=True)
os._exit(0)
"""


def _use_after_failure(comm: Comm) -> list[tuple[int, str]]:
    if comm.rank == 1:
        comm.fail(RuntimeError("out of memory"), "forward of microbatch 3")
    named = []
    for _ in range(2):
        try:
            while True:
                comm.send_object("x", 1 - comm.rank)
        except PeerFailed as error:
            named.append((error.rank, str(error).splitlines()[0]))
    return named


def test_a_rank_that_never_blocks_learns_at_its_next_call_and_at_every_later_one() -> None:
    expected = (1, "rank 1 failed in forward of microbatch 3: RuntimeError: out of memory")
    assert [ending.result for ending in endings(2, _use_after_failure)] == [[expected, expected]] * 2


SCRIPT = """
import datetime, os, signal, sys
import torch, torch.distributed as dist
from partita.errors import ExecutionError
from partita.runtime import ProcessGroupComm
rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
comm = ProcessGroupComm.from_group(timeout_s=20.0)
comm.barrier()
failing = int(sys.argv[4])
if rank == failing:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("no with block here")
    if how == "fork":
        child = os.fork()
        if not child:
            for use in (comm.barrier, ProcessGroupComm.from_group):
                try:
                    use()
                except ExecutionError as error:
                    assert "was forked by rank 1 and is not that rank" in str(error)
                else:
                    sys.exit(4)
            sys.exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        comm.barrier()
        sys.exit(0)
    sys.exit(0)
if how == "fork":
    comm.barrier()
    sys.exit(0)
other = next(r for r in range(3) if r not in (rank, failing))
comm.recv(torch.empty(1), other).wait()
"""


def _run_script(tmp_path: Path, how: str, failing: int) -> list[tuple[int, str]]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = time.monotonic()
    with reserved_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(port), how, str(failing)],
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(3)
        ]
        try:
            texts = [process.communicate(timeout=2 * LIMIT_S)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    print("seconds:", round(time.monotonic() - started, 2))  # noqa: T201
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param(
            "raise",
            "PeerFailed: rank {} failed in the main program: ValueError: no with block here",
            marks=pytest.mark.dear,
        ),
        pytest.param(
            "leave", "PeerFailed: rank {} left while another rank still waited for it", marks=pytest.mark.dear
        ),
        ("kill", "PeerFailed: rank {} died without a word (killed?)"),
    ],
)
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.dear)])
def test_a_script_without_a_with_block_is_covered_too_even_where_rank_0_hosts_the_store(
    tmp_path: Path, how: str, text: str, failing: int
) -> None:
    ends = _run_script(tmp_path, how, failing)
    for rank, (code, stderr) in enumerate(ends):
        if rank != failing:
            assert code == 1
            assert text.format(failing) in stderr


def test_a_child_that_a_rank_has_forked_may_end_as_it_likes(tmp_path: Path) -> None:
    """It has the rank's comm, and what Python does at the end of a process, but it is not the rank: where it
    ran a step, gloo ended the rank itself ("terminate called").
    """
    for code, stderr in _run_script(tmp_path, "fork", 1):
        assert code == 0, stderr


def test_a_record_survives_json_and_passing_on_keeps_the_first_rank() -> None:
    record = FailureRecord.of(3, ValueError("two\nlines"), "step 7")
    assert FailureRecord(**json.loads(json.dumps(asdict(record)))) == record
    passed_on = FailureRecord.of(0, record.to_error(), "step 8")
    assert (passed_on.rank, passed_on.traceback_text) == (3, record.traceback_text)
