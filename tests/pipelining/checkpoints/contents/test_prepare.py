"""What ranks are about to save is compared before anything is written; the steps that they have made are part
of it.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.pipelining.resuming import CASE, MICROBATCHES, pipe_of, stages_of
from tests.runtime.worlds import ProcessWorld
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining import Schedule1F1B
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.runtime import Comm, InProcessWorld


def _train(comm: Comm, plan: list[tuple[int, str, str]], load_first: bool) -> list[torch.Tensor]:
    """Steps of a model with dropout; before them what is loaded, after them where it is saved."""
    values: list[torch.Tensor] = []
    for steps, source, destination in plan:
        stage = copy.deepcopy(pipe_of(2)).build_stage(comm.rank, comm=comm)
        optimizer = torch.optim.AdamW(stage.module.parameters(), lr=0.05)
        schedule = None if load_first else Schedule1F1B(stage, MICROBATCHES, CASE.loss)
        if source:
            assert load_checkpoint(source, stage, optimizer).steps == 2
        schedule = schedule or Schedule1F1B(stage, MICROBATCHES, CASE.loss)
        for _ in range(steps):
            args, kwargs, target = CASE.data(8)
            schedule.step(*args, target=target, **kwargs)
            optimizer.step()
            optimizer.zero_grad()
        if destination:
            save_checkpoint(destination, stage, optimizer)
        values = [value.clone() for value in stage.module.state_dict().values()]
    return values


@pytest.mark.parametrize("load_first", [True, False], ids=["before the schedule", "after the schedule"])
def test_dropout_goes_on_where_it_stopped_without_being_asked(tmp_path: Path, load_first: bool) -> None:
    """The documented way began with the masks of step 0 again."""
    folder = str(tmp_path / "saved")
    whole = InProcessWorld(2).run(_train, [(4, "", "")], load_first)
    parts = InProcessWorld(2).run(_train, [(2, "", folder), (2, folder, "")], load_first)
    for left, right in zip(whole, parts, strict=True):
        assert all(map(torch.equal, left, right))


def test_ranks_out_of_step_can_not_be_saved(tmp_path: Path) -> None:
    stages, _ = stages_of(2)
    stages[1].step_count.steps = 3
    with pytest.raises(
        CheckpointError, match="rank 0 has made 0 steps, and that of rank 0 3: save where all"
    ):
        save_checkpoint(tmp_path / "new", stages)
    assert not (tmp_path / "new").exists()


def test_a_model_that_was_not_cut_says_nothing_of_steps(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Linear(1, 1))
    assert load_checkpoint(tmp_path, nn.Linear(1, 1)).steps is None


def _bad_extra(comm: Comm, path: str) -> str:
    extra = {"lr": (lambda n: n) if comm.rank == 0 else 1}
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, nn.Linear(1, 1), replicas="first", extra=extra)
    return str(caught.value)


def test_extra_that_can_not_be_saved_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Rank 0 alone raised; the other waited in save_checkpoint for half an hour."""
    first, second = ProcessWorld(2).run(_bad_extra, str(tmp_path / "new"))
    assert first == second
    assert first.startswith("rank 0: extra['lr'] is a function, which can't be saved as plain data")
    assert not (tmp_path / "new").exists()


def test_an_optimizers_setting_that_is_no_plain_data_is_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "rule": len}], lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"'optim.param_groups.weight.rule' is a builtin_function_or_meth"
    ):
        save_checkpoint(tmp_path, model, optimizer)
    save_checkpoint(tmp_path, model, optimizer, allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"'optim.param_groups.weight.rule' of .*, or no plain data"):
        load_checkpoint(tmp_path, model, optimizer)
    load_checkpoint(tmp_path, model, optimizer, allow_pickle=True)
    assert optimizer.param_groups[0]["rule"] is len
