"""Who writes a checkpoint: one process, several, or the ranks of an InProcessWorld."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tests.pipelining.resuming import CASE, pipe_of
from tests.pipelining.running import assert_equal
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining import Pipe, Schedule1F1B, load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.together.savers import savers_of
from partita.pipelining.stages import Stage
from partita.runtime import Comm, InProcessWorld


def test_a_process_alone_is_the_first_and_only_one() -> None:
    savers = savers_of(nn.Linear(1, 1), None)
    assert (savers.rank, savers.first, savers.gather("mine")) == (0, True, ["mine"])


def _trained(comm: Comm, pipe: Pipe, plan: list[tuple[int, str, str]]) -> dict[str, torch.Tensor]:
    """Steps; before them what is loaded, after them where it is saved."""
    args, _, target = CASE.data(8)
    state: dict[str, torch.Tensor] = {}
    for steps, source, destination in plan:
        stage: Stage = pipe.build_stage(comm.rank, comm=comm)
        optimizer = torch.optim.AdamW(stage.module.parameters(), lr=0.05)
        schedule = Schedule1F1B(stage, 4, CASE.loss)
        if source:
            with torch.no_grad():
                for parameter in stage.module.parameters():
                    parameter.fill_(float("nan"))
            schedule.load_state_dict(load_checkpoint(source, stage, optimizer).extra["schedule"])
        for _ in range(steps):
            schedule.step(*(args if comm.rank == 0 else ()), target=target)
            optimizer.step()
            optimizer.zero_grad()
        if destination:
            save_checkpoint(destination, stage, optimizer, extra={"schedule": schedule.state_dict()})
        state = {name: value.clone() for name, value in stage.module.state_dict().items()}
    return state


def test_ranks_of_one_process_save_together_and_any_number_goes_on(tmp_path: Path) -> None:
    folder = str(tmp_path / "two")
    whole: dict[str, Any] = {}
    for state in InProcessWorld(2).run(_trained, copy.deepcopy(pipe_of(2)), [(4, "", "")]):
        whole |= state
    InProcessWorld(2).run(_trained, copy.deepcopy(pipe_of(2)), [(2, "", folder)])
    for size in (1, 3):
        for state in InProcessWorld(size).run(_trained, copy.deepcopy(pipe_of(size)), [(2, folder, "")]):
            assert_equal(state, {name: whole[name] for name in state})


def _goes_wrong(comm: Comm, pipe: Pipe, path: str) -> list[str]:
    stage = pipe.build_stage(comm.rank, comm=comm)
    messages = []
    for _ in range(2):
        try:
            save_checkpoint(path, stage, extra={"step": 1})
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_what_goes_wrong_is_told_on_all_ranks_of_the_process(tmp_path: Path) -> None:
    first, second = InProcessWorld(2).run(_goes_wrong, pipe_of(2), str(tmp_path / "new"))
    assert first == second
    assert len(first) == 1
    assert "holds a checkpoint already" in first[0]


def test_a_place_that_can_not_be_written_to_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = InProcessWorld(2).run(_goes_wrong, pipe_of(2), str(tmp_path / "file" / "below"))
    assert first == second
    assert "could not be written" in first[0]
