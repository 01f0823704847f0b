"""The progress bar of commands."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from partita.cli.output import progress
from partita.cli.output.progress import progress_bar


def test_nothing_is_written_where_the_error_stream_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("measuring") as advance:
        advance(0.5)
        advance(2.0)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_bar_appears_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", lambda **_: terminal)
    monkeypatch.setattr(progress, "Timer", _AtOnce)
    with progress_bar("measuring") as advance:
        advance(0.5)
    assert isinstance(terminal.file, io.StringIO)
    assert "measuring" in terminal.file.getvalue()


class _AtOnce:
    """A timer that does not wait."""

    daemon = False

    def __init__(self, _seconds: float, function: object) -> None:
        self.function = function

    def start(self) -> None:
        assert callable(self.function)
        self.function()

    def cancel(self) -> None:
        """Nothing is left to stop."""

    def join(self) -> None:
        """Nothing is left to wait for."""
