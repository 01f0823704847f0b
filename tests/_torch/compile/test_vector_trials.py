"""Trials of vector instructions that went well are remembered, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch._inductor.cpu_vec_isa import VecISA

from partita._torch.compile.vector_trials import remembered_trials


class Instructions(VecISA):
    """Instructions with flags of their own."""

    _arch_flags = ""

    def __init__(self, flags: str = "") -> None:
        self._arch_flags = flags


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What is really tried, into a new cache; code with "bad" in it fails."""
    trials: list[str] = []

    def trial(_: Any, code: str) -> bool:
        trials.append(code)
        return "bad" not in code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(VecISA, "check_build", trial)
    return trials


def test_what_went_well_is_not_tried_again(tried: list[str]) -> None:
    for _ in range(2):
        with remembered_trials():
            assert Instructions().check_build("code")
    assert tried == ["code"]


def test_what_failed_is_tried_again(tried: list[str]) -> None:
    for _ in range(2):
        with remembered_trials():
            assert not Instructions().check_build("bad")
    assert tried == ["bad", "bad"]


def test_other_code_other_flags_and_another_cache_are_tried(
    tried: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with remembered_trials():
        Instructions().check_build("code")
        Instructions("-mavx2").check_build("code")
        Instructions().check_build("other")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
        Instructions().check_build("code")
    assert tried == ["code", "code", "other", "code"]


def test_torch_is_as_it_was_afterwards(tried: list[str]) -> None:
    trial = VecISA.check_build
    with remembered_trials(), remembered_trials():
        assert VecISA.check_build is not trial
    assert VecISA.check_build is trial
    Instructions().check_build("code")
    Instructions().check_build("code")
    assert tried == ["code", "code"]
