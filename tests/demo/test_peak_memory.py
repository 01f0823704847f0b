from __future__ import annotations

import sys

import pytest
import torch

from partita.demo.peak_memory import PeakMemory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_was_held_for_a_moment_counts() -> None:
    memory = PeakMemory()
    memory.start_anew()
    torch.ones(2**24)  # 64 MiB
    peak = memory.bytes()
    assert peak is not None
    assert peak >= 2**25  # the baseline may hold memory that was freed and is used again


def test_without_the_systems_figures_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.demo.peak_memory._read", lambda name: None)
    assert PeakMemory().bytes() is None
