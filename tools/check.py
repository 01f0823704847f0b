"""Every check that CI runs, in one command: format, lint, types, tests (layers and names among them)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
CHECKS = (
    ("format", [str(BIN / "ruff"), "format", "--check", "."]),
    ("lint", [str(BIN / "ruff"), "check", "."]),
    ("types", [str(BIN / "mypy")]),
    ("tests", [sys.executable, "-m", "pytest", *sys.argv[1:]]),
)


def main() -> int:
    started = time.monotonic()
    for number, (name, command) in enumerate(CHECKS, 1):
        print(f"== {number}/{len(CHECKS)} {name}", flush=True)
        status = subprocess.run(command, cwd=Path(__file__).parent.parent, check=False).returncode
        if status:
            print(f"== {name} failed (exit status {status})")
            return status
    print(f"== all {len(CHECKS)} checks passed in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
