"""How much of the communication of data parallel training is hidden, by DDP, by torch's ways to compile it,
and by ``partita_ddp``: with buckets as large as DDP's, and with planned ones?

``partita bench ddp-overlap``. Needs root: hosts are network namespaces with links of a set speed, one rank
and one thread each. Every way of training takes its steps in turn in one run. The speed of the links is set
so that communication takes 0.3, 1 and 2 times as long as computing alone, which is measured first. All cells
take most of an hour: ``--only 'mlp/2/1/*'`` measures one, ``--only '*/2/*/partita*' --only '*/2/*/DDP'`` some
ways of some (model, hosts, network over computing, way). A way that can't run has its reason in the table.

Two limits: the longer of computing and communication; and, since there are no gradients before the backward
pass, what can be reached: the forward pass, and then the longer of backward pass and communication. `exposed`
is what a step takes beyond computing alone.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ddp_network import hosts
from benchmarks.ddp_ranks import run_ranks
from benchmarks.ddp_ways import PLANNED, WAYS
from benchmarks.ddp_worker import REFERENCES, tasks
from benchmarks.harness import MIN_ROUNDS, Ratio, chosen_cells, ratio, write_json

__all__ = ["Row", "main", "measure"]


@dataclass(frozen=True)
class Row:
    """One way of training at one speed of the links. Seconds are medians.

    Attributes:
        relation: communication over computing, as aimed at.
        step_s: of a whole step, on the slowest rank.
        compute_s: the same step, compiled, without communication.
        eager_s: the same in eager mode.
        network_s: the communication alone.
        reachable_s: the forward pass and the longer of backward pass and communication.
        exposed_s: the step beyond computing.
        over_ddp: the step over that of DDP in eager mode, round by round.
        over_planned: the step over that of `partita_ddp` with planned buckets, round by round.
        over_limit: the step over the longer of computing and communication, round by round.
        over_reachable: the step over `reachable_s`, round by round.
        problem: why this way did not run; there are no figures of its step then.
    """

    model: str
    hosts: int
    relation: float
    megabits_per_s: float
    way: str
    step_s: float | None
    compute_s: float
    eager_s: float
    network_s: float
    reachable_s: float
    exposed_s: float | None
    over_ddp: Ratio | None
    over_planned: Ratio | None
    over_limit: Ratio | None
    over_reachable: Ratio | None
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
        quick: a tiny model, not compiled, two hosts and one round: whether it runs, not how fast.
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
        model, hosts_, relation, way = cell.split("/")
        cells.setdefault((model, int(hosts_)), {}).setdefault(relation, []).append(way)
    rows: list[Row] = []
    for (model, count), ways in cells.items():
        if count > (os.cpu_count() or 1):
            console.print(
                f"{count} hosts share {os.cpu_count()} cores: they take computing time from each other, so "
                "communication is hidden less well than on machines of their own",
                style="yellow",
            )
        case_rows = measure(
            model,
            count,
            ways,
            rounds=1 if quick else MIN_ROUNDS,
            backend="aot_eager" if quick else "inductor",
            console=console,
        )
        for aimed_at in dict.fromkeys(row.relation for row in case_rows):
            console.print(_table([row for row in case_rows if row.relation == aimed_at]))
        rows += case_rows
        write_json(json_path, "ddp_overlap", rows)
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
        title = f"{model} on {count} hosts"
        results = run_ranks("benchmarks.ddp_worker", names, settings, console, title, tasks(settings))
    return [row for item in results for row in _rows(model, count, item)]


def _rows(model: str, count: int, item: dict[str, Any]) -> list[Row]:
    seconds: dict[str, list[float]] = item["seconds"]
    compute_s = statistics.median(seconds["alone"])
    eager_s = statistics.median(seconds["alone in eager mode"])
    network_s = statistics.median(seconds["network"])
    rounds = list(zip(seconds["alone"], seconds["forward"], seconds["network"], strict=True))
    limit = [max(alone, network) for alone, _, network in rounds]
    reachable = [forward + max(alone - forward, network) for alone, forward, network in rounds]
    shared: dict[str, Any] = {
        "model": model,
        "hosts": count,
        "relation": float(item["relation"]),
        "megabits_per_s": float(item["megabits_per_s"]),
        "compute_s": compute_s,
        "eager_s": eager_s,
        "network_s": network_s,
        "reachable_s": statistics.median(reachable),
    }
    rows = []
    for way in sorted({*seconds, *item["problems"]} - {*REFERENCES}, key=list(WAYS).index):
        taken = seconds.get(way)
        step_s = statistics.median(taken) if taken else None
        rows.append(
            Row(
                **shared,
                way=way,
                step_s=step_s,
                exposed_s=None if step_s is None else step_s - compute_s,
                over_ddp=ratio(taken, seconds["DDP"]) if taken and "DDP" in seconds else None,
                over_planned=ratio(taken, seconds[PLANNED]) if taken and PLANNED in seconds else None,
                over_limit=ratio(taken, limit) if taken else None,
                over_reachable=ratio(taken, reachable) if taken else None,
                problem=item["problems"].get(way, ""),
            )
        )
    return rows


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    relation = first.network_s / first.compute_s
    table = Table(
        *(
            "way",
            "step (s)",
            "exposed (s)",
            "step / DDP's",
            "step / planned",
            "step / limit",
            "step / reachable",
        ),
        title=f"{first.model}, {first.hosts} hosts, network / computing {relation:.2f}\n"
        f"{first.megabits_per_s:.0f} Mbit/s; computing alone {first.compute_s:.3f} s, in eager mode "
        f"{first.eager_s:.3f} s",
    )
    for row in rows:
        figures = (row.step_s, row.exposed_s)
        ratios = (row.over_ddp, row.over_planned, row.over_limit, row.over_reachable)
        table.add_row(
            row.way,
            *("-" if figure is None else f"{figure:.3f}" for figure in figures),
            *("-" if value is None else str(value) for value in ratios),
        )
    table.caption = "\n".join(f"{row.way}: {row.problem}" for row in rows if row.problem) or None
    return table
