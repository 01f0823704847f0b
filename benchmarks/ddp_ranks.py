"""The ranks of a benchmark of data parallel training: a process in each of the hosts' namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.ddp_network import INTERFACE
from benchmarks.harness import progress_bar
from partita.errors import ExecutionError

__all__ = ["run_ranks"]

_ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 2400


def run_ranks(
    worker: str,
    hosts: Sequence[str],
    settings: Mapping[str, Any],
    console: Console,
    title: str,
    tasks: Sequence[str],
) -> Any:
    """Run a module as one rank in each host, and return what rank 0 has written to ``result.json``.

    Args:
        worker: the module; its arguments are its rank, the number of ranks, and a folder with
            ``settings.json``. Rank 0 prints a line after each of the tasks.
        hosts: names of network namespaces.
        title: of the bar on ``console``.

    Raises:
        ExecutionError: a rank failed, or the limit of time passed; with what each of them wrote.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
        with (
            _ranks(worker, hosts, folder) as ranks,
            progress_bar(console, title, tasks) as done,
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
        return json.loads(result.read_text(encoding="utf-8"))


@contextmanager
def _ranks(worker: str, hosts: Sequence[str], folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A rank in each namespace; none outlives the block, the time limit, or a SIGTERM."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    ranks: list[subprocess.Popen[str]] = []

    def end() -> None:
        for rank in ranks:
            rank.kill()

    timer = threading.Timer(_LIMIT_S, end)
    before = signal.signal(signal.SIGTERM, lambda *_arguments: sys.exit(143))
    try:
        for number, name in enumerate(hosts):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", worker]
            with _stderr(folder, number).open("w", encoding="utf-8") as stderr:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(number), str(len(hosts)), str(folder)],
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
        signal.signal(signal.SIGTERM, before)
        end()
        for rank in ranks:
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()


def _stderr(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stderr"
