"""The command ``partita``: one file a subcommand, and one place where errors become messages."""

from __future__ import annotations

import sys
from importlib import import_module

import typer
from rich.console import Console

from partita._version import __version__
from partita.errors import PartitaError

__all__ = ["app", "main"]

app = typer.Typer(name="partita", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Cuts a PyTorch model's graph into pieces, runs them, and proves that they do what the whole did."""


for _name in ("bench", "demo", "explain"):
    app.command(_name)(getattr(import_module(f"partita.cli.{_name}"), _name))


def main() -> None:
    """Run the command. An error that partita raises on purpose is shown as a message, exit status 1."""
    console = Console(stderr=True)
    try:
        app()
    except PartitaError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
