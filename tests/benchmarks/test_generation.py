"""The benchmark of generation says what it needs before it starts; how fast it is, nobody asserts."""

from __future__ import annotations

import sys

import pytest
from benchmarks.generation import main
from rich.console import Console

from partita.errors import UsageError


def test_without_transformers_it_says_so_before_any_process_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'partita\[hf\]'"):
        main(quick=True, console=Console(quiet=True))
