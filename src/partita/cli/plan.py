"""``partita plan``: where to cut a model, and which schedule, for a cluster that need not be there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from partita.cli.options.machines import Machines
from partita.cli.options.model_options import Architecture, ConfigJson, Dtype, ModelType, Overrides, Sequence
from partita.cli.options.plan_options import (
    LIST_SCHEDULE,
    PlanOptions,
    device_names,
)
from partita.cli.options.saved_costs import SavedCosts, refuse_model_options
from partita.cli.output.output_files import check_outputs, write_outputs
from partita.cli.output.progress import progress_bar
from partita.cli.output.stdout import drawing_width, stdout_console
from partita.cli.pages.large_values import large_value_words
from partita.cli.pages.plan_page import Planned, gains_of
from partita.errors import UsageError
from partita.planning import CostModel, reduced_tied_gradients, schedule_names
from partita.reporting import (
    candidate_table,
    format_bytes,
    format_seconds,
    planned_stage_rows,
    planned_table,
    render_plan_html,
    simulation_timeline,
    timeline_drawing,
)

__all__ = ["plan"]

_MOST_LANES = 24
_MOST_ROWS = 12


def _complete_device(incomplete: str) -> list[str]:
    count, times, name = incomplete.rpartition("x")
    return [count + times + device for device in device_names() if device.lower().startswith(name.lower())]


def _complete_schedule(incomplete: str) -> list[str]:
    return [
        name
        for name in ("auto", LIST_SCHEDULE, *schedule_names())
        if name.lower().startswith(incomplete.lower())
    ]


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="FILE.py:NAME, a function that returns (model, args) or (model, args, kwargs); hf:TYPE or "
            "hf:FOLDER with a config.json; or a cost model that was saved (FILE.json)."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="What to plan for, such as 16xH100.", autocompletion=_complete_device),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="How many machines the devices are in.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="In place of devices: measure here, for so many processes.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="What a rank may hold, such as 80GB.")] = None,
    device_file: Annotated[Path | None, typer.Option(help="A table of devices of your own (TOML).")] = None,
    microbatches: Annotated[int, typer.Option(help="Microbatches of a step.")] = 8,
    stages: Annotated[str, typer.Option(help="auto, or a multiple of the ranks.")] = "auto",
    schedule: Annotated[
        str, typer.Option(help="auto, or names between commas.", autocompletion=_complete_schedule)
    ] = "auto",
    parameter_copies: Annotated[
        float,
        typer.Option(
            help="Parameters, gradients and optimizer state, as multiples of the parameters in their dtype: "
            "4 for Adam, 8 for Adam with float32 states and weights of bfloat16 parameters, 1 for inference."
        ),
    ] = 4.0,
    tied_gradients: Annotated[
        str,
        typer.Option(
            help="exact: those of tied weights travel in each microbatch; reduced: one sum a step, equal but "
            "for rounding, for schedules made with tied_gradients='reduced'."
        ),
    ] = "exact",
    recompute: Annotated[
        bool, typer.Option(help="Whether units may be computed again in the backward pass to save memory.")
    ] = True,
    config_json: ConfigJson = None,
    model_type: ModelType = None,
    set_: Overrides = None,
    architecture: Architecture = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a microbatch (default: 1).")] = None,
    sequence: Sequence = None,
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page here too.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, for pipeline(plan=...).")] = None,
    save_costs: Annotated[Path | None, typer.Option(help="Write the costs here, to plan from again.")] = None,
) -> None:
    """Choose stages, ranks and schedule of a pipeline, from costs measured here or worked out for devices.

    Weights are never loaded, and nothing is downloaded.

    \b
    partita plan model.py:build --ranks 2 --out plan.json  # measured on this machine
    partita plan hf:llama --set num_hidden_layers=80 --set hidden_size=8192 --devices 16xH100 --nodes 2
    partita plan --config-json config.json --devices 8xA100 --memory 40GB --html plan.html  # a local file
    partita plan model.py:build --devices 8xH100 --schedule 1F1B,ZBVZeroBubble --save-costs costs.json
    partita plan costs.json --devices 16xH200 --microbatches 64  # the same costs, another cluster
    """
    # Whatever can be refused is refused before a model is made.
    check_outputs({"--html": html, "--out": out, "--save-costs": save_costs})
    if tied_gradients not in ("exact", "reduced"):
        raise UsageError(f"--tied-gradients is {tied_gradients!r:.40}: give exact or reduced")
    machines = Machines(devices, ranks, nodes, memory, device_file)
    cluster, device = machines.cluster()
    chosen = stages, schedule, parameter_copies, recompute
    request = PlanOptions.from_options(cluster, microbatches, *chosen, machines)
    is_saved = model is not None and model.endswith(".json") and not model.startswith("hf:")
    source = None
    if is_saved:
        named: dict[str, object] = {"--config-json": config_json, "--model-type": model_type, "--set": set_}
        named |= {"--architecture": architecture, "--batch": batch, "--sequence": sequence, "--dtype": dtype}
        refuse_model_options(str(model), named)
    else:
        from partita.cli.models.model_source import choose_source

        options = architecture, batch, sequence, dtype
        source = choose_source(model, config_json, model_type, tuple(set_ or ()), *options)

    # Costs, then plans, then what changes would bring.
    assumed = {"parameter copies": f"{parameter_copies:g}"}
    if source is None:
        saved = SavedCosts.read(Path(str(model)), device)
        costs = saved.costs
        if saved.dtype is not None:
            request = request.in_dtype(saved.dtype)
            assumed = {"dtype": saved.dtype, **assumed}
        if saved.seconds:
            assumed = {"seconds": saved.seconds, **assumed}
    else:
        from partita.cli.models.measured_costs import measure_costs

        with progress_bar("capturing and costing the model") as progress:
            measured = measure_costs(source, device, cluster.ranks, request.stages, progress)
        costs = measured.costs
        if measured.dtype is not None:
            request = request.in_dtype(measured.dtype)
        assumed = {"microbatch": measured.microbatch, "dtype": str(measured.dtype), **assumed}
    write_outputs([(save_costs, costs.to_json)])
    if tied_gradients == "reduced":
        costs = reduced_tied_gradients(costs)
        assumed = {**assumed, "tied gradients": tied_gradients}
    title = str(model) if source is None else source.title
    with progress_bar("searching") as progress:
        planned = Planned.of(title, request, request.candidates(costs, progress))
    with progress_bar("searching after changes") as progress:
        gains = gains_of(request, costs, progress) if html is not None else ()

    environment = {"devices": devices or f"{ranks} × this machine", **assumed, "torch": version("torch")}
    written = write_outputs(
        [
            (out, planned.plan.to_json),
            (html, lambda: render_plan_html(planned.report(gains, environment))),
        ]
    )
    if as_json:
        print(json.dumps({**planned.as_dict(), "assumed": assumed}, indent=2))
    else:
        console = stdout_console()
        console.print(_assumptions(assumed), soft_wrap=True)
        _show(console, planned)
        for words in (*large_value_words(costs, planned.plan), *_tied_words(costs, planned)):
            console.print(words, soft_wrap=True)
    for path in written:
        print(f"wrote {path}", file=sys.stderr if as_json else sys.stdout)


def _assumptions(assumed: Mapping[str, str]) -> str:
    """What a plan's memory and times are for, and which options change it."""
    lines = [f"a microbatch: {assumed['microbatch']}"] if assumed.get("microbatch") else []
    lines += [f"seconds: {assumed['seconds']}"] if "seconds" in assumed else []
    dtype = f" ({assumed['dtype']})" if "dtype" in assumed else ""
    lines.append(
        f"memory: {assumed['parameter copies']} times the parameters{dtype}, for them, their gradients and "
        "the optimizer's state (--parameter-copies)"
    )
    if "tied gradients" in assumed:
        lines.append(
            "tied weights: one sum of their gradients after each step (tied_gradients='reduced'); a schedule "
            "that is made from the plan does that"
        )
    return "\n".join(lines)


def _tied_words(costs: CostModel, planned: Planned) -> tuple[str, ...]:
    """What gradients of tied weights do in each microbatch of a plan, and how to do without; or what their
    sums take.
    """
    stages, simulation = planned.plan.stages, planned.simulation
    if any(stage.summed_gradients for stage in stages):
        sums_s = simulation.makespan_s - max(span.end_s for span in simulation.spans)
        return (f"the step ends {format_seconds(sums_s)} after its last pass, with the gradients' sum",)
    if not any(stage.tied_gradients for stage in stages):
        return ()
    size = format_bytes(sum(tied.gradient_bytes for tied in costs.tied))
    return (
        f"the gradients of tied weights ({size}) go from stage to stage in each microbatch, and wait "
        "there: for one sum a step, equal but for rounding, there is --tied-gradients reduced",
    )


def _show(console: Console, planned: Planned) -> None:
    console.print(planned_table(planned_stage_rows(planned.plan)))
    console.print(candidate_table(planned.rows()[:_MOST_ROWS], limits=planned.limits, title="Candidates"))
    console.print()
    timeline = simulation_timeline(planned.simulation, planned.plan.schedule)
    console.print(timeline_drawing(timeline, drawing_width(console), most_lanes=_MOST_LANES), soft_wrap=True)
    peaks = ", ".join(format_bytes(peak) for peak in planned.simulation.peak_bytes[:8])
    more = len(planned.simulation.peak_bytes) - 8
    console.print(f"peak memory by rank: {peaks}{f' and {more} more' if more > 0 else ''}", soft_wrap=True)
