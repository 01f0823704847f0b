"""What would do where nothing fits, as options to type."""

from __future__ import annotations

from typing import Any

from partita.cli.options.machines import Machines
from partita.errors import InfeasiblePlan
from partita.planning.hardware._sizes import write_bytes

__all__ = ["in_options"]


def in_options(
    error: InfeasiblePlan, machines: Machines | None, stages_per_rank: int | None
) -> InfeasiblePlan:
    """The same error with its changes as options of ``partita plan``.

    Args:
        error: as `search` raises it.
        machines: as they were asked for, where that was by options.
        stages_per_rank: where ``--stages`` was given.
    """
    if error.changes:
        remedies = [_in_words(*change, machines, stages_per_rank) for change in error.changes.items()]
        remedy = f"; {' or '.join(remedies)} it would fit"
    else:
        remedy = "" if error.reason == str(error) else "; take fewer ranks or stages"
    return InfeasiblePlan(f"{error.reason}{remedy}", error.reason, error.changes)


def _in_words(what: str, value: Any, machines: Machines | None, stages_per_rank: int | None) -> str:
    if what == "memory_bytes":
        return _more_memory(value, None if machines is None else machines.device_memory_bytes)
    if what == "ranks":
        return _more_ranks(value, machines, stages_per_rank)
    if what == "recompute":
        return "without --no-recompute"
    if what == "tied_gradients":
        return f"with --tied-gradients {value}"
    if what == "schedules":
        return "with --schedule auto"
    if what == "parameter_copies":
        return f"with --parameter-copies {value:g} (a leaner optimizer)"
    smaller = " (a smaller batch)" if what == "microbatches" else ""
    return f"with --{what} {value}{smaller}"


def _more_memory(size: int, available: int | None) -> str:
    text = write_bytes(size)
    option = f"--memory {text.replace(' bytes', 'B').replace(' ', '')}"
    if available is not None and size > available:
        return f"with devices of {text} ({option})"
    return f"with {option}"


def _more_ranks(ranks: int, machines: Machines | None, stages_per_rank: int | None) -> str:
    more = None if machines is None else machines.with_ranks(ranks)
    option = f"with {ranks} ranks" if more is None else f"with {more.in_options()}"
    return option if stages_per_rank is None else f"{option} --stages {stages_per_rank * ranks}"
