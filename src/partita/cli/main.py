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
from partita.cli.output.python_advice import python_advice
from partita.cli.output.stdout import refuse_full_disk, take_any_character
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

_TYPED_WRONGLY: Any = typer.BadParameter.__bases__[0]
"""What all errors about options and commands are; typer shows them in a box of five lines."""
_INTERRUPTED = 130


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
    """Run the command. An error that partita raises on purpose is shown as a message, and so is what typer
    says of options and commands.

    The exit status is 2 where what was typed, or a file that was named, can't be used, and 1 for the others.
    """
    refuse_full_disk()
    take_any_character()
    try:
        # The name is the same under `python -m partita`, so that a shell can complete it.
        status = app(prog_name="partita", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(1)
    except PartitaError as error:
        advice = python_advice(str(error))
        _print_error(type(error).__name__, f"{error}\n({advice})" if advice else str(error))
        is_input = isinstance(error, ArgumentError | PlanError) and not isinstance(error, InfeasiblePlan)
        sys.exit(2 if is_input else 1)
    except _TYPED_WRONGLY as error:
        message = " ".join(error.format_message().split())
        if message:  # there is none where the help was shown, as no command was typed
            where = f" See {error.ctx.command_path} --help" if error.ctx is not None else ""
            _print_error("UsageError", f"{message if message[-1] in '.?' else f'{message}.'}{where}")
        sys.exit(error.exit_code)
    except typer.Abort as error:
        if isinstance(error.__cause__, EOFError):  # no end of input: something that was read ended too early
            raise error.__cause__ from None
        sys.exit(_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _print_error(name: str, message: str) -> None:
    console = Console(stderr=True)
    console.print(f"[bold red]{name}[/]: ", end="")
    console.print(message, markup=False, highlight=False, soft_wrap=True)
