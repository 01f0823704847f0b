"""Cut architectures and write ``docs/models.md``: which are equal to the uncut model, which not, and why.

    python -m tools.models_table                     all of them, two at a time; rewrites docs/models.md
    python -m tools.models_table --only llama --only t5     some; prints, writes nothing
    python -m tools.models_table --part 2 --cut 2    those of the second part, cut in 2 only; writes nothing
    python -m tools.models_table --json rows.json    keep the rows as data; goes on where a run was stopped
    python -m tools.models_table --compiled          puts the column of compiled stages into the page

Each architecture has a process of its own with a time limit, so that a crash is a row and not the end.

The first part needs the extra ``hf``, pip install 'partita[hf]', the second more libraries. Some of them ask
for a torchvision, and that for a torch of its own; so ``make architectures`` installs them beside, without
what they ask for.

What of torchvision is compiled need not fit: `tools.models.torchvision_stub` declares its operators then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tools.models.architecture import Architecture
from tools.models.column import with_compiled
from tools.models.forks import compiled_in_fork
from tools.models.page import page
from tools.models.row import CELLS, COMPILED_WORDS, STAGES, Row
from tools.models.zoo import PARTS, ZOO

__all__ = ["main"]

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"


_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def run_row(architecture: Architecture, limit: float, stages: Sequence[int] = STAGES) -> Row:
    """Make the row of one architecture, in a process of its own.

    Args:
        limit: seconds; what is not compared by then says so in its cell.
        stages: into how many it is cut, one after the other.
    """
    command = [sys.executable, "-m", "tools.models.row", architecture.name, *map(str, stages)]
    environment = os.environ | _SETTINGS
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        text, end = done.stdout, f"exit status {done.returncode}: {_last_line(done.stderr)}"
    except subprocess.TimeoutExpired as expired:
        text = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        end = f"not done after {limit:.0f} s"
    lines = [line for line in text.splitlines() if line.startswith("{")]
    empty = Row(architecture.name, architecture.family, architecture.model)
    row = Row(**json.loads(lines[-1])) if lines else empty
    for cell in CELLS:
        if int(cell.split()[0]) in stages:
            row.cells.setdefault(cell, end)
    row.torch_own = row.torch_own or end
    row.compiled = row.compiled or end
    return row


def run_compiled(architecture: Architecture, limit: float) -> Row:
    """Make the row of one architecture with nothing in it but the column of compiled stages."""
    started = time.monotonic()
    row = Row(architecture.name, architecture.family, architecture.model)
    row.compiled = compiled_in_fork(architecture, limit)
    row.seconds = time.monotonic() - started
    return row


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="An architecture; may be given several times.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Keep rows here; those found in it are not made again.")
    ] = None,
    part: Annotated[int | None, typer.Option(help="Of the page: 1 or 2.")] = None,
    cut: Annotated[list[int] | None, typer.Option(help="Into so many stages; 2 and 4 otherwise.")] = None,
    compiled: Annotated[
        bool, typer.Option(help="Only the column of compiled stages, which is put into the page.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="How many at a time.")] = 2,
    limit: Annotated[float, typer.Option(help="Seconds for one architecture.")] = 600.0,
    out: Annotated[
        Path | None, typer.Option(help="Write the page here; docs/models.md for a run of all.")
    ] = None,
) -> None:
    """Cut Hugging Face architectures in 2 and 4 stages and compare them with the uncut models."""
    console = Console(stderr=True)
    names = [architecture.name for architecture in ZOO]
    unknown = [name for name in only or [] if name not in names]
    if unknown:
        console.print(f"there is no architecture {', '.join(unknown)}; there are {', '.join(names)}")
        raise typer.Exit(2)
    listed = PARTS[0] if compiled else ZOO if part is None else PARTS[part - 1]
    stages = tuple(cut or STAGES)
    chosen = [architecture for architecture in listed if not only or architecture.name in only]
    os.environ.update(_SETTINGS)  # before anything is forked
    rows = _kept(json_file)
    waiting = [architecture for architecture in chosen if architecture.name not in rows]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("architectures", total=len(waiting))
        for future in as_completed(
            [
                pool.submit(run_compiled, architecture, limit)
                if compiled
                else pool.submit(run_row, architecture, limit, stages)
                for architecture in waiting
            ]
        ):
            row = future.result()
            rows[row.name] = row
            _keep(rows, json_file)
            progress.advance(task)
            progress.console.print(
                f"{row.name}: {row.compiled[:300]} ({row.seconds:.0f} s)"
                if compiled
                else _summary(row, stages)
            )
    ordered = [rows[architecture.name] for architecture in chosen]
    target = out or (None if only or part or cut else PAGE)
    if target is not None:
        text = with_compiled(PAGE.read_text(encoding="utf-8"), rows) if compiled else page(ordered)
        target.write_text(text, encoding="utf-8")
    passed = sum(row.compiled in COMPILED_WORDS if compiled else row.passed_in(stages) for row in ordered)
    console.print(f"{passed} of {len(ordered)} equal to the uncut model in everything that was compared")


def _kept(file: Path | None) -> dict[str, Row]:
    if file is None or not file.exists():
        return {}
    return {row["name"]: Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))}


def _keep(rows: dict[str, Row], file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1) + "\n", encoding="utf-8")


def _summary(row: Row, stages: Sequence[int]) -> str:
    if row.passed_in(stages):
        return f"{row.name}: equal ({row.seconds:.0f} s)"
    wrong = {text: cell for cell, text in reversed(row.cells.items()) if text}
    return "\n".join([f"{row.name}:", *(f"  {cell}: {text[:300]}" for text, cell in wrong.items())])


if __name__ == "__main__":
    typer.run(main)
