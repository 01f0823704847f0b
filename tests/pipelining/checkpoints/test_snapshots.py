"""Snapshots beside training: whole or not there, the newest few, and as they were when they were taken."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipelining.resuming import CASE, MICROBATCHES, pipe_of
from tests.runtime.worlds import ProcessWorld, endings
from torch import nn

from partita.errors import ArgumentError, CheckpointError, PeerFailed
from partita.pipelining import Schedule1F1B, load_checkpoint
from partita.pipelining.checkpoints import Snapshots, latest_checkpoint
from partita.pipelining.checkpoints.files import manifest_writer
from partita.runtime import Comm, InProcessWorld


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_hold_what_was_there_when_they_were_taken(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Snapshots(tmp_path, every=2, keep=2) as snapshots:
        for step in range(1, 7):
            nn.init.constant_(model.weight, step)
            snapshots.save(step, model, extra={"step": step})
            nn.init.constant_(model.weight, -1)
    assert _names(tmp_path) == ["step-000000004", "step-000000006"]
    for step in (4, 6):
        other = nn.Linear(2, 2)
        assert load_checkpoint(tmp_path / f"step-{step:09}", other).extra == {"step": step}
        assert torch.equal(other.weight, torch.full((2, 2), float(step)))
        assert torch.equal(other.bias, model.bias)


def test_state_that_comes_and_grows_is_copied_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        snapshots.save(2, model, optimizer)
    other = torch.optim.AdamW(model.parameters())
    load_checkpoint(tmp_path / "step-000000002", model, other)
    assert torch.equal(other.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_one_that_fails_is_not_there_and_is_told_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(tmp_path)
    snapshots.save(1, nn.Linear(1, 1))
    snapshots.wait()

    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest_writer, "write_manifest", full)
        snapshots.save(2, nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match=r"step-000000002' could not be written: .*No space left"):
            snapshots.save(3, nn.Linear(1, 1))
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000001"
    snapshots.close()
    with Snapshots(tmp_path) as again:  # a run that starts again clears up, and may make one step twice
        again.save(1, nn.Linear(1, 1))
    assert _names(tmp_path) == ["step-000000001"]


def test_numbers_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="every is 0: give at least 1"):
        Snapshots(tmp_path, every=0)
    with pytest.raises(ArgumentError, match="keep is 0: give at least 1"):
        Snapshots(tmp_path, keep=0)


def _train(comm: Comm, pipe: Any, folder: str) -> list[str]:
    """Four steps with a snapshot of each second one; then on from the last but one's copy."""
    stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
    optimizer = torch.optim.AdamW(stage.module.parameters(), lr=0.05)
    schedule = Schedule1F1B(stage, MICROBATCHES, CASE.loss)
    args, kwargs, target = CASE.data(8)

    def steps() -> None:
        for _ in range(2):
            schedule.step(*args, target=target, **kwargs)
            optimizer.step()
            optimizer.zero_grad()

    with Snapshots(folder, every=2) as snapshots:
        for step in (2, 4):
            steps()
            snapshots.save(step, stage, optimizer)
    whole = {name: value.clone() for name, value in stage.module.state_dict().items()}
    latest = latest_checkpoint(folder)
    assert latest is not None
    assert latest.name == "step-000000004"
    restored = load_checkpoint(latest.with_name("step-000000002"), stage, optimizer)
    assert restored.steps == 2
    steps()
    assert all(torch.equal(value, whole[name]) for name, value in stage.module.state_dict().items())
    return list(whole)


def test_processes_snapshot_together_and_go_on(tmp_path: Path) -> None:
    states = ProcessWorld(2).run(_train, pipe_of(2), str(tmp_path))
    assert set().union(*states) == CASE.model().state_dict().keys()


def test_ranks_of_one_process_snapshot_together(tmp_path: Path) -> None:
    InProcessWorld(2).run(_train, pipe_of(2), str(tmp_path))
    assert _names(tmp_path) == ["step-000000002", "step-000000004"]


def _one_dies(comm: Comm, folder: str) -> None:
    """Rank 1 ends while the others write."""
    module = nn.Linear(2, 2)
    with Snapshots(folder) as snapshots:
        snapshots.save(1, module)
        snapshots.wait()
        if comm.rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(manifest_writer.ManifestWriter, "write_data", lambda *_: os._exit(1))
                snapshots.save(2, module)
                snapshots.wait()
        snapshots.save(2, module)
        snapshots.wait()


def test_a_rank_that_dies_while_it_writes_is_named_and_the_snapshot_before_stays(tmp_path: Path) -> None:
    first, _, third = endings(3, _one_dies, str(tmp_path))
    for ending in (first, third):
        assert isinstance(ending.error, PeerFailed), ending.text
        assert ending.error.rank == 1
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000001"
