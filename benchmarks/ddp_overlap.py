"""How much of the communication of data parallel training is hidden, by DDP in four ways and by
``partita_ddp`` in two: with buckets as large as DDP's, and with buckets planned from measurements?

``partita bench ddp-overlap``. Needs root: hosts are network namespaces with links of a set speed, one rank
and one thread each. Every way of training takes its steps in turn in one run. The speed of the links is set
so that communication takes 0.3, 1 and 2 times as long as computing alone, which is measured first.

Two limits: the longer of computing and communication; and, since there are no gradients before the backward
pass, what can be reached: the forward pass, and then the longer of backward pass and communication. `exposed`
is what a step takes beyond computing alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.ddp_network import INTERFACE, hosts
from benchmarks.ddp_worker import REFERENCES, tasks
from benchmarks.harness import MIN_ROUNDS, Ratio, progress_bar, ratio, write_json
from partita.errors import ExecutionError

__all__ = ["Row", "main", "measure"]

_ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 2400


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
        over_limit: the step over the longer of computing and communication, round by round.
        over_reachable: the step over `reachable_s`, round by round.
    """

    model: str
    hosts: int
    relation: float
    megabits_per_s: float
    way: str
    step_s: float
    compute_s: float
    eager_s: float
    network_s: float
    reachable_s: float
    exposed_s: float
    over_ddp: Ratio
    over_limit: Ratio
    over_reachable: Ratio


def main(*, quick: bool = False, json_path: Path | None = None, console: Console | None = None) -> list[Row]:
    """Measure every case, print a table for each, and write JSON where a path is given.

    Args:
        quick: a tiny model, not compiled, two hosts and one round: whether it runs, not how fast.

    Raises:
        UsageError: this process may not make network namespaces.
    """
    console = console or Console()
    cases = (
        [("tiny", 2)] if quick else [(model, count) for model in ("mlp", "transformer") for count in (2, 4)]
    )
    rows: list[Row] = []
    for model, count in cases:
        if count > (os.cpu_count() or 1):
            console.print(
                f"{count} hosts share {os.cpu_count()} cores: they take computing time from each other, so "
                "communication is hidden less well than on machines of their own",
                style="yellow",
            )
        case_rows = measure(
            model,
            count,
            relations=(1.0,) if quick else (0.3, 1.0, 2.0),
            rounds=1 if quick else MIN_ROUNDS,
            backend="aot_eager" if quick else "inductor",
            console=console,
        )
        for relation in dict.fromkeys(row.relation for row in case_rows):
            console.print(_table([row for row in case_rows if row.relation == relation]))
        rows += case_rows
    write_json(json_path, "ddp_overlap", rows)
    return rows


def measure(
    model: str,
    count: int,
    *,
    relations: tuple[float, ...],
    rounds: int,
    backend: str,
    console: Console,
) -> list[Row]:
    """Measure all ways at all speeds, for one model on so many hosts, with a bar on ``console``."""
    settings = {"model": model, "relations": relations, "rounds": rounds, "backend": backend}
    with tempfile.TemporaryDirectory() as name, hosts(count) as names:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        with (
            _ranks(names, folder) as ranks,
            progress_bar(console, f"{model} on {count} hosts", tasks(settings)) as done,
        ):
            for _ in ranks[0].stdout or ():
                done()
            codes = [rank.wait() for rank in ranks]
        result = folder / "result.json"
        if any(codes) or not result.exists():
            endings = "\n".join(
                f"rank {rank} ended with {code} and wrote:\n{_stderr(folder, rank).read_text()[-1500:]}"
                for rank, code in enumerate(codes)
            )
            raise ExecutionError(f"the measurement did not come to its end (limit {_LIMIT_S} s)\n{endings}")
        results = json.loads(result.read_text(encoding="utf-8"))
    return [row for item in results for row in _rows(model, count, item)]


@contextmanager
def _ranks(names: list[str], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A rank in each namespace; none outlives the block, or the time limit."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    ranks: list[subprocess.Popen[str]] = []

    def end() -> None:
        for rank in ranks:
            rank.kill()

    timer = threading.Timer(_LIMIT_S, end)
    try:
        for number, name in enumerate(names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.ddp_worker"]
            with _stderr(folder, number).open("w", encoding="utf-8") as stderr:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(number), str(len(names)), str(folder)],
                        cwd=_ROOT,
                        env=environment,
                        stdout=subprocess.DEVNULL if number else subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                    )
                )
        timer.start()
        yield ranks
    finally:
        timer.cancel()
        end()
        for rank in ranks:
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()


def _stderr(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stderr"


def _rows(model: str, count: int, item: dict[str, object]) -> list[Row]:
    seconds: dict[str, list[float]] = item["seconds"]  # type: ignore[assignment]
    compute_s = statistics.median(seconds["alone"])
    eager_s = statistics.median(seconds["alone in eager mode"])
    network_s = statistics.median(seconds["network"])
    rounds = list(zip(seconds["alone"], seconds["forward"], seconds["network"], strict=True))
    limit = [max(alone, network) for alone, _, network in rounds]
    reachable = [forward + max(alone - forward, network) for alone, forward, network in rounds]
    rows = []
    for way, taken in seconds.items():
        if way in REFERENCES:
            continue
        step_s = statistics.median(taken)
        rows.append(
            Row(
                model=model,
                hosts=count,
                relation=float(item["relation"]),  # type: ignore[arg-type]
                megabits_per_s=float(item["megabits_per_s"]),  # type: ignore[arg-type]
                way=way,
                step_s=step_s,
                compute_s=compute_s,
                eager_s=eager_s,
                network_s=network_s,
                reachable_s=statistics.median(reachable),
                exposed_s=step_s - compute_s,
                over_ddp=ratio(taken, seconds["DDP"]),
                over_limit=ratio(taken, limit),
                over_reachable=ratio(taken, reachable),
            )
        )
    return rows


def _table(rows: list[Row]) -> Table:
    first = rows[0]
    relation = first.network_s / first.compute_s
    table = Table(
        *("way", "step (s)", "exposed (s)", "step / DDP's", "step / limit", "step / reachable"),
        title=f"{first.model}, {first.hosts} hosts, network / computing {relation:.2f}\n"
        f"{first.megabits_per_s:.0f} Mbit/s; computing alone {first.compute_s:.3f} s, in eager mode "
        f"{first.eager_s:.3f} s",
    )
    for row in rows:
        ratios = (row.over_ddp, row.over_limit, row.over_reachable)
        table.add_row(row.way, f"{row.step_s:.3f}", f"{row.exposed_s:.3f}", *map(str, ratios))
    return table
