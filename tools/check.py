"""Every check that CI runs, in one command: format, lint, types, tests (layers and names among them), and
what somebody gets who installs partita.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parent.parent
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")
CHECKS = (
    ("format", [str(BIN / "ruff"), "format", "--check", "."]),
    ("lint", [str(BIN / "ruff"), "check", "."]),
    ("types", [str(BIN / "mypy")]),
    # Tests of one file stay together, since some share what is costly to set up. A worker that dies is not
    # replaced: pytest-xdist would wait for ever where the other one has ended already.
    ("tests", [sys.executable, "-m", "pytest", *WORKERS, "--durations", "10", *sys.argv[1:]]),
    ("docs", [str(BIN / "mkdocs"), "build", "--quiet"]),
    ("wheel", [sys.executable, str(ROOT / "tools" / "check_wheel.py")]),
)


def main() -> int:
    started = time.monotonic()
    for number, (name, command) in enumerate(CHECKS, 1):
        print(f"== {number}/{len(CHECKS)} {name}", flush=True)
        # The processes of a test share two cores as it is, and compile no source that another one has.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if status:
            print(f"== {name} failed (exit status {status})")
            return status
    print(f"== all {len(CHECKS)} checks passed in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
