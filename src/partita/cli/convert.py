"""``partita convert``: a schedule from one form into another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partita.cli.options.schedule_cases import stages_a_rank
from partita.cli.options.schedule_file import read_schedule_file
from partita.cli.output.output_files import check_outputs, write_outputs
from partita.cli.output.stdout import print_json
from partita.errors import ScheduleError, UsageError
from partita.planning import Plan, Schedule, get_schedule, lower, schedule_names, schedule_of, validate

__all__ = ["convert"]

_FORMS = (".csv", ".json")


def _complete_source(incomplete: str) -> list[str]:
    return [name for name in schedule_names() if name.lower().startswith(incomplete.lower())]


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A schedule (torch's CSV, or JSON), a plan (JSON), or the name of a schedule, such as 1F1B.",
            autocompletion=_complete_source,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="FILE.csv for torch's CSV, FILE.json for a schedule in JSON.")],
    ranks: Annotated[int | None, typer.Option(help="Processes of a named schedule.")] = None,
    stages: Annotated[
        int | None,
        typer.Option(help="Its stages (default: one or two a rank, as the schedule was thought out for)."),
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Its microbatches (default: 8).")] = None,
    messages: Annotated[
        bool | None,
        typer.Option(
            "--messages/--no-messages",
            help="Write sends and receives out, or leave all but the passes out (default: as it is).",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write a schedule as torch's CSV or as JSON. An order that can't be run is refused.

    \b
    partita convert plan.json order.csv  # the order of a plan, for torch.distributed.pipelining
    partita convert ZBVZeroBubble order.csv --ranks 4 --microbatches 16
    partita convert order.csv order.json  # for partita.planning.Schedule.from_json
    partita convert order.csv with_messages.csv --messages  # torch's format "compute_comms"
    """
    check_outputs({"OUT": out})
    if out.suffix.lower() not in _FORMS:
        raise UsageError(f"OUT is {out}: its name has to end in .csv or .json, which says the form")
    numbers = {"--ranks": ranks, "--stages": stages, "--microbatches": microbatches}
    for option, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"{option} is {value}: give 1 or more")
    path = Path(source)
    if path.suffix or path.exists():
        typed = next((option for option, value in numbers.items() if value is not None), None)
        if typed is not None:
            raise UsageError(f"{typed} is given with {source}, which has its own: leave it out")
        schedule = _read(path)
    else:
        schedule = _named(source, ranks, stages, microbatches or 8)
    validate(schedule)
    if messages is False:
        schedule = schedule.compute_only()
    elif messages and not schedule.is_lowered:
        schedule = lower(schedule)
    is_csv = out.suffix.lower() == ".csv"
    write_outputs([(out, schedule.to_csv if is_csv else schedule.to_json)])
    if as_json:
        print_json(
            wrote=str(out),
            schedule=schedule.name,
            stages=schedule.stages,
            ranks=schedule.ranks,
            microbatches=schedule.microbatches,
            messages=schedule.is_lowered,
        )
        return
    print(
        f"wrote {out}: {schedule.name}, {schedule.stages} stages on {schedule.ranks} ranks, "
        f"{schedule.microbatches} microbatch{'' if schedule.microbatches == 1 else 'es'}"
    )


def _read(path: Path) -> Schedule:
    read = read_schedule_file(path)
    return schedule_of(read) if isinstance(read, Plan) else read


def _named(name: str, ranks: int | None, stages: int | None, microbatches: int) -> Schedule:
    try:
        kind = get_schedule(name)
    except ScheduleError as error:
        raise ScheduleError(f"{error}; or give a file") from error
    if ranks is None:
        raise UsageError(f"{name} is the name of a schedule, and --ranks is not given: give it, such as 4")
    return kind(ranks * stages_a_rank(kind) if stages is None else stages, microbatches, ranks)
