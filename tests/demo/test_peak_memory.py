from __future__ import annotations

import mmap
import sys

import pytest

from partita.demo.peak_memory import PeakMemory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_was_held_for_a_moment_counts() -> None:
    memory = PeakMemory()
    memory.start_anew()
    with mmap.mmap(-1, 2**26) as held:  # a tensor could lie where another test's lay, which is counted before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    peak = memory.bytes()
    assert peak is not None
    assert peak >= 2**26 - 2**22  # meanwhile some of what was held before can have gone


def test_without_the_systems_figures_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.demo.peak_memory._read", lambda name: None)
    assert PeakMemory().bytes() is None
