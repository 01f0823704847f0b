"""The command ``partita``: one file a subcommand, and one place where errors become messages."""

from __future__ import annotations

import keyword
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from partita._version import __version__
from partita.errors import ArgumentError, InfeasiblePlan, PartitaError, PlanError

__all__ = ["app", "main"]

_COMMANDS = (
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
)


class _Commands(TyperGroup):
    """Imports a command when it is asked for: most need torch, which takes seconds, and some do without."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 (the signature of click)
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        own = typer.Typer(add_completion=False)
        own.command(cmd_name)(getattr(import_module(f"partita.cli.{name}"), name))
        return typer.main.get_command(own)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name the command that was likely meant, where there is none of that name."""
        near = get_close_matches(args[0], _COMMANDS, 1) if args and args[0] not in _COMMANDS else []
        if near and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(name="partita", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


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


def main() -> None:
    """Run the command. An error that partita raises on purpose is shown as a message.

    The exit status is 2 where what was typed, or a file that was named, can't be used, and 1 for the others.
    """
    console = Console(stderr=True)
    try:
        app(prog_name="partita")  # under `python -m partita` too, so that a shell can complete it
    except PartitaError as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        is_input = isinstance(error, ArgumentError | PlanError) and not isinstance(error, InfeasiblePlan)
        sys.exit(2 if is_input else 1)
