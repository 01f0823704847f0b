"""What is read from a checkpoint is what was written, and nothing of it is run."""

from __future__ import annotations

import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints.files.manifest import MANIFEST

DATA = "__0_0.distcp"


def _trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "step1"
    save_checkpoint(path, *_trained(1), extra={"step": 1})
    return path


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    shutil.copytree(good, tmp_path / "bad")
    return tmp_path / "bad"


def _refused(path: Path, message: str) -> None:
    """The checkpoint does not load, and nothing has changed."""
    model, optimizer = _trained(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(map(torch.equal, moments, [state["exp_avg"] for state in optimizer.state.values()]))


@pytest.mark.parametrize("name", [DATA, ".metadata", MANIFEST])
def test_a_flipped_bit_is_an_error_that_names_the_file(name: str, bad: Path) -> None:
    """Of 100 flipped bits in the data 20 gave other parameters without a word."""
    whole = (bad / name).read_bytes()
    draw = random.Random(0)
    for _ in range(8):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(7)
        (bad / name).write_bytes(damaged)
        _refused(bad, re.escape(name))


@pytest.mark.parametrize("name", [DATA, ".metadata", MANIFEST])
def test_a_file_that_is_cut_off_or_gone_is_an_error_that_names_it(name: str, bad: Path) -> None:
    whole = (bad / name).read_bytes()
    (bad / name).write_bytes(whole[: len(whole) // 2])
    _refused(bad, re.escape(name))
    (bad / name).unlink()
    _refused(bad, re.escape(name))


def test_a_checkpoint_that_was_not_finished_is_told(bad: Path) -> None:
    (bad / MANIFEST).unlink()
    _refused(bad, r"bad' is not whole: partita.json is missing, which is written last; take another")


def test_files_of_two_checkpoints_are_not_taken_for_one(bad: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "other", *_trained(3))
    shutil.copy(tmp_path / "other" / DATA, bad / DATA)
    _refused(bad, re.escape(DATA))
    shutil.copy(tmp_path / "other" / ".metadata", bad / ".metadata")
    _refused(bad, r"metadata'")


RAN: list[str] = []


def _run(what: str) -> None:
    RAN.append(what)


class _Evil:
    """A pickle of it calls `_run`."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _run, ("it",)


def _foreign(folder: Path) -> Path:
    """As torch writes it: there are no checksums."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process.*")
        dcp.save({"model": _trained(1)[0].state_dict()}, checkpoint_id=folder)
    return folder


def test_a_pickle_in_the_table_of_contents_is_not_run(tmp_path: Path) -> None:
    folder = _foreign(tmp_path / "theirs")
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    _refused(
        folder,
        r"metadata' is damaged, or is not what torch writes .*allow_pickle=True if you know who wrote it",
    )
    assert RAN == []
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(folder, nn.Linear(1, 1), allow_pickle=True)
    assert RAN == ["it"]  # it ran, and is no table of contents
    RAN.clear()


def test_what_torch_wrote_is_read_without_running_anything(tmp_path: Path) -> None:
    model, _ = _trained(2)
    load_checkpoint(_foreign(tmp_path), model)
    assert torch.equal(model[0].weight, _trained(1)[0][0].weight)  # type: ignore[index]


def test_a_pickle_among_the_values_is_not_run(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path, model, extra={"what": _Evil()}, allow_pickle=True)
    RAN.clear()
    with pytest.raises(CheckpointError, match=r"'partita_extra.what' of .* is damaged, or no plain data"):
        load_checkpoint(tmp_path, model)
    assert RAN == []
    load_checkpoint(tmp_path, model, allow_pickle=True)
    assert RAN == ["it"]
    RAN.clear()


def test_a_table_of_contents_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    folder = _foreign(tmp_path / "theirs")
    text = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(text.replace(DATA.encode(), b"../" + DATA[3:].encode()))
    _refused(folder, "lies outside of the directory")
