"""The command: its help, its version, and errors as messages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from partita import __version__


def partita(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "partita", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_version_is_printed() -> None:
    result = partita("--version")
    assert (result.returncode, result.stdout.strip()) == (0, __version__)


def test_help_lists_the_commands() -> None:
    result = partita("--help")
    assert result.returncode == 0
    assert "demo" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--steps", "0"), "UsageError: --steps is 0: give 1 or more"),
        (("demo", "--schedule", "nonsense"), "ScheduleError: there is no schedule class 'nonsense'"),
    ],
)
def test_what_can_not_be_used_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = partita(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
