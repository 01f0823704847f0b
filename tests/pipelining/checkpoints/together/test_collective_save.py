"""Ranks that write a directory of torch's together: all of it is there, or all know on which rank what went
wrong.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from partita.errors import PeerFailed
from partita.pipelining.checkpoints.together.collective_save import save_together
from partita.runtime import Comm, InProcessWorld


class _Full(OSError):
    """Arrives as it is."""


class _Locked(Exception):
    """Can't be sent."""

    def __init__(self) -> None:
        super().__init__("no room")
        self.lock = threading.Lock()


class _TwoParts(Exception):
    """Can be sent, but not received."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} {where}")


class _Faulty(FileSystemWriter):
    """Raises in one of its steps."""

    def __init__(self, path: Path, step: str, error: Exception) -> None:
        super().__init__(path)
        self._error = error
        setattr(self, step, self._fail)

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error


def _state(rank: int) -> dict[str, Any]:
    return {"shared": torch.arange(3.0), f"weight {rank}": torch.full((2,), rank + 1.0), f"step {rank}": rank}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_what_the_ranks_have_saved_together(tmp_path: Path) -> None:
    def body(comm: Comm) -> None:
        save_together(comm, _state(comm.rank), FileSystemWriter(tmp_path))

    InProcessWorld(2).run(body)
    loaded: dict[str, Any] = {"step 0": None, "step 1": None}
    loaded |= {"shared": torch.zeros(3), "weight 0": torch.zeros(2), "weight 1": torch.zeros(2)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert (loaded["step 0"], loaded["step 1"]) == (0, 1)
    assert loaded["shared"].tolist() == [0, 1, 2]
    assert loaded["weight 0"].tolist() == [1, 1]
    assert loaded["weight 1"].tolist() == [2, 2]


def _fails(tmp_path: Path, failing: int, step: str, error: Exception) -> list[CheckpointException]:
    """What each rank raises where one of them fails."""

    def body(comm: Comm) -> CheckpointException:
        is_faulty = comm.rank == failing
        writer = _Faulty(tmp_path, step, error) if is_faulty else FileSystemWriter(tmp_path)
        with pytest.raises(CheckpointException) as caught:
            save_together(comm, _state(comm.rank), writer)
        comm.barrier()  # it goes on being of use
        return caught.value

    raised: list[CheckpointException] = InProcessWorld(2).run(body)
    assert not (tmp_path / ".metadata").exists()
    return raised


@pytest.mark.parametrize(
    ("failing", "step", "name"),
    [
        (1, "prepare_local_plan", "planning"),
        (0, "prepare_global_plan", "planning for all"),
        (1, "write_data", "writing"),
        (0, "finish", "finishing"),
    ],
)
def test_what_goes_wrong_on_one_rank_all_raise_with_its_name(
    tmp_path: Path, failing: int, step: str, name: str
) -> None:
    for raised in _fails(tmp_path, failing, step, _Full("no room")):
        assert raised.args[0] == name
        assert raised.failures.keys() == {failing}
        error, trace = raised.failures[failing]
        assert isinstance(error, _Full)
        assert trace[-1].name == "_fail"
        assert f"(RANK {failing})" in str(raised)
        assert "no room" in str(raised)


@pytest.mark.parametrize("error", [_Locked(), _TwoParts("no", "room")], ids=["not sent", "not received"])
def test_what_can_not_be_sent_is_told_in_words(tmp_path: Path, error: Exception) -> None:
    for raised in _fails(tmp_path, 1, "write_data", error):
        assert raised.failures.keys() == {1}
        assert str(raised.failures[1][0]) == repr(error)


def test_what_goes_wrong_on_both_is_told_of_both(tmp_path: Path) -> None:
    def body(comm: Comm) -> CheckpointException:
        with pytest.raises(CheckpointException) as caught:
            save_together(comm, {}, _Faulty(tmp_path, "write_data", _Full(f"disk {comm.rank}")))
        return caught.value

    for raised in InProcessWorld(2).run(body):
        assert [str(error) for error, _ in raised.failures.values()] == ["disk 0", "disk 1"]


def test_a_rank_that_failed_elsewhere_is_not_waited_for(tmp_path: Path) -> None:
    heard: list[PeerFailed] = []

    def body(comm: Comm) -> None:
        if comm.rank == 1:
            raise ValueError("the loss is not finite")
        with pytest.raises(PeerFailed) as caught:
            save_together(comm, _state(comm.rank), FileSystemWriter(tmp_path))
        heard.append(caught.value)

    with pytest.raises(ValueError, match="not finite"):
        InProcessWorld(2).run(body)
    assert [error.rank for error in heard] == [1]
    assert not (tmp_path / ".metadata").exists()
