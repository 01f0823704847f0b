"""How much of FSDP's communication is exposed in eager mode, compiled with its modules marked for Dynamo, and
compiled without the marks: what is annotating for?

``partita bench fsdp-overlap``. Needs root: hosts are network namespaces with links of a set speed, one rank
and one thread each, and every way of training takes its steps in turn in one run. The speed of the links is
set so that communication takes 0.3, 1 and 2 times as long as computing alone, which is measured first.
``--only 'mlp/2/1/*'`` measures some cells of all (model, hosts, network over computing, way).

`exposed` is what a step takes beyond computing alone (compiled, or in eager mode for the eager way), and its
share is that of the communication alone. Beside it stand the graphs that Dynamo made, and the values that it
checks at each call.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ddp_network import hosts
from benchmarks.ddp_ranks import run_ranks
from benchmarks.fsdp_ways import ANNOTATED, EAGER, WAYS
from benchmarks.fsdp_worker import REFERENCES, tasks
from benchmarks.harness import MIN_ROUNDS, Ratio, chosen_cells, ratio, write_json

__all__ = ["Row", "main", "measure"]


@dataclass(frozen=True)
class Row:
    """One way of training at one speed of the links. Seconds are medians of steps on the slowest rank.

    Attributes:
        relation: communication over computing, as aimed at.
        network_s: the communication alone.
        compute_s: the step without communication, compiled; in eager mode for the eager way.
        exposed_s: the step beyond computing.
        exposed_share: of the communication alone.
        over_annotated: the step over that of the compiled and annotated model, round by round.
        over_limit: the step over the longer of computing and communication, round by round.
        graphs: that Dynamo compiled.
        guards: values that Dynamo checks at each call.
        problem: why this way did not run; there are no figures of it then.
    """

    model: str
    hosts: int
    relation: float
    megabits_per_s: float
    way: str
    network_s: float
    compute_s: float
    step_s: float | None
    exposed_s: float | None
    exposed_share: float | None
    over_annotated: Ratio | None
    over_limit: Ratio | None
    graphs: int | None
    guards: int | None
    problem: str = ""


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    console: Console | None = None,
    only: Sequence[str] = (),
) -> list[Row]:
    """Measure every cell, print a table for each speed, and write JSON where a path is given.

    Args:
        quick: a tiny model, not compiled by Inductor, one round: whether it runs, not how fast.
        only: patterns of the cells to measure, ``model/hosts/relation/way``.

    Raises:
        UsageError: this process may not make network namespaces, or a pattern matches no cell.
    """
    console = console or Console()
    models = ("tiny",) if quick else ("mlp", "transformer")
    counts, relations = ((2,), ("1",)) if quick else ((2, 4), ("0.3", "1", "2"))
    every = ["/".join(map(str, cell)) for cell in itertools.product(models, counts, relations, WAYS)]
    cells: dict[tuple[str, int], dict[str, list[str]]] = {}
    for cell in chosen_cells(every, only):
        model, count, relation, way = cell.split("/")
        cells.setdefault((model, int(count)), {}).setdefault(relation, []).append(way)
    rows: list[Row] = []
    for (model, number), ways in cells.items():
        case_rows = measure(
            model,
            number,
            ways,
            rounds=1 if quick else MIN_ROUNDS,
            backend="aot_eager" if quick else "inductor",
            console=console,
        )
        for relation in dict.fromkeys(row.relation for row in case_rows):
            console.print(_table([row for row in case_rows if row.relation == relation]))
        rows += case_rows
        write_json(json_path, "fsdp_overlap", rows)
    return rows


def measure(
    model: str,
    count: int,
    cells: Mapping[str, Sequence[str]],
    *,
    rounds: int,
    backend: str,
    console: Console,
) -> list[Row]:
    """Measure one model on so many hosts, with a bar on ``console``.

    Args:
        cells: from each relation of network to computing, as text, to the ways that take turns at it.
    """
    settings = {"model": model, "cells": cells, "rounds": rounds, "backend": backend}
    with hosts(count) as names:
        title = f"sharded {model} on {count} hosts"
        results = run_ranks("benchmarks.fsdp_worker", names, settings, console, title, tasks(settings))
    return [row for item in results for row in _rows(model, count, item)]


def _rows(model: str, count: int, item: dict[str, Any]) -> list[Row]:
    seconds: dict[str, list[float]] = item["seconds"]
    network_s = statistics.median(seconds["network"])
    rows = []
    for way in sorted({*seconds, *item["problems"]} - {*REFERENCES}, key=list(WAYS).index):
        taken = seconds.get(way)
        alone = seconds["alone in eager mode" if way == EAGER else "alone"]
        compute_s = statistics.median(alone)
        step_s = statistics.median(taken) if taken else None
        exposed_s = None if step_s is None else step_s - compute_s
        limit = [max(pair) for pair in zip(alone, seconds["network"], strict=True)]
        rows.append(
            Row(
                model=model,
                hosts=count,
                relation=float(item["relation"]),
                megabits_per_s=float(item["megabits_per_s"]),
                way=way,
                network_s=network_s,
                compute_s=compute_s,
                step_s=step_s,
                exposed_s=exposed_s,
                exposed_share=None if exposed_s is None else exposed_s / network_s,
                over_annotated=ratio(taken, seconds[ANNOTATED]) if taken and ANNOTATED in seconds else None,
                over_limit=ratio(taken, limit) if taken else None,
                graphs=item["graphs"].get(way),
                guards=item["guards"].get(way),
                problem=item["problems"].get(way, ""),
            )
        )
    return rows


_COLUMNS = (
    *("way", "step (s)", "alone (s)", "exposed (s)", "of network", "step / annotated", "step / limit"),
    *("graphs", "guards"),
)


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    table = Table(
        *_COLUMNS,
        title=f"{first.model}, {first.hosts} hosts, network {first.network_s:.3f} s at "
        f"{first.megabits_per_s:.0f} Mbit/s",
    )
    for row in rows:
        table.add_row(
            row.way,
            *(_seconds(value) for value in (row.step_s, row.compute_s, row.exposed_s)),
            "-" if row.exposed_share is None else f"{row.exposed_share:.0%}",
            *("-" if value is None else str(value) for value in (row.over_annotated, row.over_limit)),
            *("-" if value is None else str(value) for value in (row.graphs, row.guards)),
        )
    table.caption = "\n".join(f"{row.way}: {row.problem}" for row in rows if row.problem) or None
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
