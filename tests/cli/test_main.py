"""The command: its help, its version, and errors as messages."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from partita import __version__
from partita.cli import main as main_module


def partita(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "partita", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_version_is_printed() -> None:
    result = partita("--version")
    assert (result.returncode, result.stdout.strip()) == (0, __version__)


def test_help_lists_the_commands() -> None:
    result = partita("--help")
    assert result.returncode == 0
    for name in (
        "bench",
        "convert",
        "demo",
        "explain",
        "export",
        "import",
        "plan",
        "report",
        "simulate",
        "split",
        "verify",
    ):
        assert f"│ {name} " in result.stdout


def test_options_of_commands_are_known_without_torch() -> None:
    """Which takes seconds to import: help and completion would be as slow."""
    script = (
        "import sys; import partita.cli.main as main; group = main.typer.main.get_command(main.app);"
        "print(*(len(group.get_command(None, name).params) for name in group.list_commands(None)));"
        "print('torch' in sys.modules)"
    )
    counts, has_torch = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    ).stdout.splitlines()
    assert all(int(count) for count in counts.split())
    assert has_torch == "False"


def test_python_m_partita_calls_itself_partita() -> None:
    assert "Usage: partita simulate [OPTIONS]" in partita("simulate", "--help").stdout


def test_completion_is_installed_and_completes_commands_and_values(tmp_path: Path) -> None:
    # As `python -m partita` the installed file was for a command of that name, which no shell can complete.
    script = tmp_path / "bin" / "partita"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m partita "$@"\n')
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"

    def bash(*lines: str) -> str:
        result = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            env={**os.environ, "HOME": str(tmp_path), "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "bash completion installed" in bash(
        f"{shlex.quote(sys.executable)} -m partita --install-completion", "exit $?"
    )
    completions = bash(
        'source "$HOME/.bash_completions/partita.sh"',
        "COMP_WORDS=(partita si) COMP_CWORD=1; _partita_completion partita; echo ${COMPREPLY[@]}",
        "COMP_WORDS=(partita simulate --schedule ZB) COMP_CWORD=3; _partita_completion partita",
        "echo ${COMPREPLY[@]}",
    )
    assert completions.splitlines() == ["simulate", "ZBH1 ZBH2 ZB2p ZBVZeroBubble"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--steps", "0"), "UsageError: --steps is 0: give 1 or more"),
        pytest.param(
            ("demo", "--schedule", "nonsense"),
            "ScheduleError: there is no schedule 'nonsense'",
            marks=pytest.mark.dear,
        ),
    ],
)
def test_what_can_not_be_used_is_one_message_and_status_2(arguments: tuple[str, ...], message: str) -> None:
    result = partita(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("verfy", "UsageError: No such command 'verfy'. Did you mean 'verify'? See partita --help"),
        ("nonsense", "UsageError: No such command 'nonsense'. See partita --help"),
        ("simulate --bogus", "UsageError: No such option: --bogus. See partita simulate --help"),
        ("simulate --ranks x", "UsageError: Invalid value for '--ranks': "),
        ("simulate --ranks", "UsageError: Option '--ranks' requires an argument."),
        ("convert", "UsageError: Missing argument 'source'. See partita convert --help"),
    ],
)
def test_what_is_typed_wrongly_is_one_line(
    arguments: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """These stood in a box of five lines, and in no line that a log could be searched for."""
    monkeypatch.setattr(sys, "argv", ["partita", *arguments.split()])
    with pytest.raises(SystemExit, match=r"^2$"):
        main_module.main()
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_without_a_command_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["partita"])
    with pytest.raises(SystemExit, match=r"^2$"):
        main_module.main()
    printed = capsys.readouterr()
    assert "Usage: partita [OPTIONS] COMMAND" in printed.out + printed.err
    assert "Error" not in printed.out + printed.err


def test_an_error_about_a_file_that_ends_too_early_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typer takes every EOFError for the end of what is typed, and says nothing."""
    app = typer.Typer()

    @app.command()
    def read_half() -> None:
        raise EOFError("half a file")

    monkeypatch.setattr(main_module, "app", app)
    monkeypatch.setattr(sys, "argv", ["partita"])
    with pytest.raises(EOFError, match="half a file"):
        main_module.main()
