"""Every check that CI runs, in one command: format, lint, types, tests (layers and names among them), and
what somebody gets who installs partita.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# One more than there are cores: many tests wait for processes that they have started, or for a time limit.
WORKERS = (
    "-n",
    str(min(CORES + 1, 8)),
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
    "--max-worker-restart",
    "0",
)
CHECKS = (
    (("format", [str(BIN / "ruff"), "format", "--check", "."]),),
    (("lint", [str(BIN / "ruff"), "check", "."]),),
    (("types", [str(BIN / "mypy")]), ("docs", [str(BIN / "mkdocs"), "build", "--quiet"])),
    # Tests of one file stay together, since some share what is costly to set up. A worker that dies is not
    # replaced: pytest-xdist would wait for ever where the other one has ended already.
    (
        ("tests", [sys.executable, "-m", "pytest", *WORKERS, "--durations", "10", *sys.argv[1:]]),
        ("wheel", [sys.executable, str(ROOT / "tools" / "check_wheel.py")]),
    ),
)
"""Those of one group run side by side. What the first of them prints is shown as it comes."""


def main() -> int:
    started = time.monotonic()
    # The processes of a test share two cores as it is, and compile no source that another one has.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for group in CHECKS:
        print(f"== {', '.join(name for name, _ in group)}", flush=True)
        failed = 0
        with ThreadPoolExecutor(len(group)) as pool:
            runs = {
                pool.submit(_run, command, environment, shown=number == 0): name
                for number, (name, command) in enumerate(group)
            }
            for run in as_completed(runs):
                status, text = run.result()
                if text:
                    print(f"\n-- {runs[run]}\n{text}", flush=True)
                if status:
                    print(f"== {runs[run]} failed (exit status {status})", flush=True)
                failed = failed or status
        if failed:
            return failed
    count = sum(map(len, CHECKS))
    print(f"== all {count} checks passed in {time.monotonic() - started:.0f} s")
    return 0


def _run(command: list[str], environment: dict[str, str], *, shown: bool) -> tuple[int, str]:
    """The exit status of a command, and what it printed where that is not shown at once."""
    to = None if shown else subprocess.PIPE
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, text=True, stdout=to, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout or ""


if __name__ == "__main__":
    raise SystemExit(main())
