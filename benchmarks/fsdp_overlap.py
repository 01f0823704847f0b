"""How much of FSDP's communication is exposed: in eager mode, compiled without the marks by which Dynamo
knows FSDP's modules, and compiled with those of ``partita.fsdp``?

``partita bench fsdp-overlap``. Needs root: two hosts are network namespaces with links of a set speed, one
rank and one thread each. A model of Llama's kind, each block in `fully_shard`. Every way of training takes
its steps in turn in one run, at links without a limit and at such that communication takes 0.3, 1 and 2
times as long as computing alone, which is measured first. Gradients of each way are compared with those of
the model that is neither sharded nor compiled before anything is measured.

`exposed` is what a step takes beyond the same step on links without a limit. ``--only 'llama/1/*'`` measures
one speed, ``--only '*/compiled*'`` some ways; a way that can't run has its reason in the table.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ddp_network import hosts
from benchmarks.ddp_ranks import run_ranks
from benchmarks.fsdp_ways import EAGER, UNMARKED, WAYS
from benchmarks.fsdp_worker import ALONE, NETWORK, UNLIMITED, tasks
from benchmarks.harness import MIN_ROUNDS, Ratio, chosen_cells, ratio, write_json

__all__ = ["Row", "main", "measure"]

_HOSTS = 2


@dataclass(frozen=True)
class Row:
    """One way of training at one speed of the links. Seconds are medians.

    Attributes:
        relation: communication over computing, as aimed at.
        step_s: of a whole step, on the slower rank.
        unlimited_s: the same on links without a limit.
        compute_s: a step of the compiled model that is not sharded.
        network_s: the collectives alone.
        exposed_s: the step beyond the one on links without a limit.
        exposed_share: the same over `network_s` beyond the collectives on links without a limit, round by
            round: 1 where nothing is hidden.
        over_eager: the step over that of eager mode, round by round.
        over_unmarked: the step over that of the compiled model without marks, round by round.
        problem: why this way did not run; there are no figures of its step then.
    """

    model: str
    relation: float
    megabits_per_s: float
    way: str
    step_s: float | None
    unlimited_s: float | None
    compute_s: float
    network_s: float
    exposed_s: float | None
    exposed_share: Ratio | None
    over_eager: Ratio | None
    over_unmarked: Ratio | None
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
        quick: a tiny model, compiled as far as the backward graph, and one round: whether it runs, not how
            fast.
        only: patterns of the cells to measure, ``model/relation/way``.

    Raises:
        UsageError: this process may not make network namespaces, or a pattern matches no cell.
    """
    console = console or Console()
    model, relations = ("tiny", ("1",)) if quick else ("llama", ("0.3", "1", "2"))
    every = ["/".join(cell) for cell in itertools.product((model,), relations, WAYS)]
    cells = [tuple(cell.split("/")[1:]) for cell in chosen_cells(every, only)]
    rows = measure(
        model,
        cells,
        rounds=1 if quick else MIN_ROUNDS,
        backend="aot_eager" if quick else "inductor",
        console=console,
    )
    for aimed_at in dict.fromkeys(row.relation for row in rows):
        console.print(_table([row for row in rows if row.relation == aimed_at]))
    write_json(json_path, "fsdp_overlap", rows)
    return rows


def measure(
    model: str, cells: Sequence[tuple[str, ...]], *, rounds: int, backend: str, console: Console
) -> list[Row]:
    """Measure one model, with a bar on ``console``.

    Args:
        cells: pairs of a relation of network to computing, as text, and a way.
    """
    settings = {
        "model": model,
        "relations": list(dict.fromkeys(relation for relation, _ in cells)),
        "ways": list(dict.fromkeys(way for _, way in cells)),
        "rounds": rounds,
        "backend": backend,
    }
    with hosts(_HOSTS) as names:
        result = run_ranks("benchmarks.fsdp_worker", names, settings, console, model, tasks(settings))
    return [_row(model, relation, way, result) for relation, way in cells]


def _row(model: str, relation: str, way: str, result: dict[str, Any]) -> Row:
    seconds: dict[str, list[float]] = result["seconds"]
    step, unlimited = seconds.get(f"{relation}/{way}"), seconds.get(f"{UNLIMITED}/{way}")
    exposed = share = None
    if step and unlimited:
        exposed = _beyond(step, unlimited)
        share = ratio(exposed, _beyond(seconds[f"{relation}/{NETWORK}"], seconds[f"{UNLIMITED}/{NETWORK}"]))
    eager, unmarked = (seconds.get(f"{relation}/{other}") for other in (EAGER, UNMARKED))
    return Row(
        model=model,
        relation=float(relation),
        megabits_per_s=result["megabits_per_s"][relation],
        way=way,
        step_s=statistics.median(step) if step else None,
        unlimited_s=statistics.median(unlimited) if unlimited else None,
        compute_s=statistics.median(seconds[f"{UNLIMITED}/{ALONE}"]),
        network_s=statistics.median(seconds[f"{relation}/{NETWORK}"]),
        exposed_s=statistics.median(exposed) if exposed else None,
        exposed_share=share,
        over_eager=ratio(step, eager) if step and eager else None,
        over_unmarked=ratio(step, unmarked) if step and unmarked else None,
        problem=result["problems"].get(way, ""),
    )


def _beyond(seconds: list[float], others: list[float]) -> list[float]:
    return [one - other for one, other in zip(seconds, others, strict=True)]


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    table = Table(
        *(
            "way",
            "step (s)",
            "unlimited (s)",
            "exposed (s)",
            "exposed / network",
            "step / eager",
            "step / unmarked",
        ),
        title=f"{first.model}, 2 hosts, network / computing {first.network_s / first.compute_s:.2f}\n"
        f"{first.megabits_per_s:.0f} Mbit/s; computing alone {first.compute_s:.3f} s, network alone "
        f"{first.network_s:.3f} s",
    )
    for row in rows:
        figures = (row.step_s, row.unlimited_s, row.exposed_s)
        ratios = (row.exposed_share, row.over_eager, row.over_unmarked)
        table.add_row(
            row.way,
            *("-" if figure is None else f"{figure:.3f}" for figure in figures),
            *("-" if value is None else str(value) for value in ratios),
        )
    table.caption = "\n".join(f"{row.way}: {row.problem}" for row in rows if row.problem) or None
    return table
