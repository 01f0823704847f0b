"""What ends a process is known to its exit handlers, whatever the Python and whoever started it."""

from __future__ import annotations

import atexit
import sys
import traceback
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from tests.runtime import worlds

from partita.runtime.failures.ending import ending_error, see_how_child_ends


def _child(how: str, path: Path) -> None:
    def tell() -> None:
        if not path.exists():
            path.write_text(repr(ending_error()))

    see_how_child_ends()
    atexit.register(tell)
    Finalize(None, tell, exitpriority=0)
    try:
        raise KeyError("handled")
    except KeyError:
        traceback.print_exc()
    if how == "raises":
        raise ValueError("full")
    sys.exit({"ends": None, "exits": 3}[how])


@pytest.mark.parametrize(
    ("how", "error"), [("raises", "ValueError('full')"), ("exits", "SystemExit(3)"), ("ends", "None")]
)
def test_what_ends_a_process_of_multiprocessing_is_seen(tmp_path: Path, how: str, error: str) -> None:
    process = worlds._CONTEXT.Process(target=_child, args=(how, tmp_path / "told"))
    process.start()
    process.join(worlds.LIMIT_S)
    assert (tmp_path / "told").read_text() == error
    assert process.exitcode == {"raises": 1, "exits": 3, "ends": 0}[how]


def test_nothing_ends_a_process_that_goes_on() -> None:
    own = traceback.print_exc
    see_how_child_ends()  # this process is no child of multiprocessing
    assert traceback.print_exc is own
    assert ending_error() is None
