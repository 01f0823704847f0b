"""``partita simulate``: how long a step takes under which schedule, in imagined time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli.options.schedule_cases import SimulatedSchedule, simulate_cases
from partita.cli.options.simulate_options import SimulateOptions, SimulationSubject
from partita.cli.output.output_files import check_outputs, write_outputs
from partita.cli.output.progress import progress_bar
from partita.cli.output.stdout import drawing_width, stdout_console
from partita.planning import schedule_names
from partita.reporting import (
    candidate_table,
    render_plan_html,
    simulation_timeline,
    timeline_drawing,
    timeline_svg,
)

__all__ = ["simulate"]

_MOST_LANES = 24


def _complete_schedule(incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    names = schedule_names() if comma else ("all", *schedule_names())
    return [before + comma + name for name in names if name.lower().startswith(last.lower())]


def simulate(
    file: Annotated[
        Path | None,
        typer.Argument(help="A plan (JSON), or a schedule (torch's CSV, or JSON). Without it, give --ranks."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes; with a file, how many there are.")] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            help="Stages, a multiple of the ranks. Without it each schedule has as many as it was thought "
            "out for (one or two a rank), and the times are those of all stages of a rank together."
        ),
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches of a step (default: 8).")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="all, or names between commas (default: all; the plan's own).",
            autocompletion=_complete_schedule,
        ),
    ] = None,
    f: Annotated[
        str | None,
        typer.Option(
            "--f", help="Time of F, such as 3ms; one for all stages, or one a stage (default: 1ms)."
        ),
    ] = None,
    i: Annotated[str | None, typer.Option("--i", help="Time of I (default: F's).")] = None,
    w: Annotated[str | None, typer.Option("--w", help="Time of W; B is I and W (default: F's).")] = None,
    comm: Annotated[str | None, typer.Option(help="Time of a message (default: 0s).")] = None,
    activation: Annotated[
        str | None, typer.Option(help="What a stage keeps of a microbatch, such as 1.5GB.")
    ] = None,
    weight_activation: Annotated[
        str | None,
        typer.Option(help="How much of that W still needs after I, such as 0.6 or 60% (default: all of it)."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="What a rank may hold: a size such as 80GB, or, without --activation and a plan, a number "
            "of microbatches."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page here too.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the drawing of the best one here too.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the best one as a Chrome trace.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the best one as torch's CSV.")] = None,
) -> None:
    """Compare pipeline schedules by a simulated step: makespan, bubble, memory, and a drawing of the best.

    \b
    partita simulate --ranks 8 --microbatches 32  # all schedules
    partita simulate --ranks 8 --microbatches 32 --memory 5  # in the memory of 5 microbatches
    partita simulate --ranks 4 --schedule VHalf,1F1B --f 3ms --i 3ms --w 2ms --comm 0.1ms  # two of them
    partita simulate plan.json --schedule all  # a plan's stages under all schedules
    partita simulate schedule.csv --f 2ms --svg step.svg --trace step.json  # a schedule of your own
    """
    check_outputs({"--html": html, "--svg": svg, "--trace": trace, "--csv": csv})
    settings = SimulateOptions(
        ranks, stages, microbatches, schedule, (f, i, w), comm, activation, weight_activation, memory
    )
    subject = settings.of_times() if file is None else settings.of_file(file)
    with progress_bar("simulating") as progress:
        simulated, refused = simulate_cases(subject.cases, progress)
    ranked = sorted(simulated, key=subject.order)
    best = ranked[0]
    written = write_outputs(
        [
            (trace, lambda: subject.trace(best)),
            (csv, best.schedule.to_csv),
            (svg, lambda: timeline_svg([simulation_timeline(best.simulation, best.case.name)])),
            (html, lambda: render_plan_html(subject.report(ranked, refused))),
        ]
    )
    if as_json:
        print(json.dumps(subject.as_dict(ranked, refused), indent=2))
    else:
        _show(stdout_console(), subject, ranked, refused)
    for path in written:
        print(f"wrote {path}", file=sys.stderr if as_json else sys.stdout)


def _show(
    console: Console, subject: SimulationSubject, ranked: list[SimulatedSchedule], refused: dict[str, str]
) -> None:
    best = ranked[0]
    console.print(
        candidate_table([subject.row(one) for one in ranked], unit=subject.unit, limits=subject.limits)
    )
    for name, reason in refused.items():
        console.print(
            f"left out: {reason}" if name in reason else f"left out: {name}: {reason}",
            markup=False,
            soft_wrap=True,
        )
    console.print()
    timeline = simulation_timeline(best.simulation, best.case.name)
    console.print(timeline_drawing(timeline, drawing_width(console), most_lanes=_MOST_LANES), soft_wrap=True)
