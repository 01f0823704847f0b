from __future__ import annotations

import subprocess
import sys

import partita.planning


def test_planning_imports_no_torch() -> None:
    code = "import partita.planning, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_public_names_are_sorted_and_exist() -> None:
    names = partita.planning.__all__
    assert names == sorted(names)
    assert all(hasattr(partita.planning, name) for name in names)
