"""What a process frees, it keeps for what it needs next."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")

_MAPPED = """
import ctypes
import resource
import torch

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd".split()]
    _fields_ += [("others", 5 * ctypes.c_size_t)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def take_and_free():
    blocks = [torch.ones(2**20, dtype=torch.uint8) for _ in range(200)]
    return sum(block[0].item() for block in blocks)

def is_given_back():
    '\''Whether a block of 24 MiB is one that the system has back as soon as it is freed.'\''
    before = mallinfo().hblkhd
    block = torch.empty(24 * 2**20, dtype=torch.uint8)
    return mallinfo().hblkhd - before >= block.nbytes

"""

_AFTER_A_BLOCK = """
from partita.runtime.freed_memory import freed_memory_kept

before = mallinfo().hblkhd
with freed_memory_kept():
    pass
assert mallinfo().hblkhd == before
"""

_IN_A_SCHEDULE = """
from partita.pipelining import ScheduleGPipe, pipeline
from partita.runtime import InProcessWorld

def train(comm):
    stage = pipeline(torch.nn.Linear(2, 2), (torch.ones(2, 2),), stages=1).build_stage(0, comm=comm)
    ScheduleGPipe(stage, 2, torch.nn.functional.mse_loss)

InProcessWorld(1).run(train)
"""

_WHERE_COSTS_ARE_MEASURED = """
from partita.pipelining.measuring.meter import CLOCK
from partita.pipelining.measuring.pass_times import pass_times
from partita.pipelining.measuring.unit_run import UnitRun

pass_times([UnitRun("negative", lambda x: [-x], (torch.ones(2, requires_grad=True),))], CLOCK, 1)
"""

_KEPT_AND_GIVEN_BACK = """
from partita.pipelining import ScheduleGPipe, pipeline
from partita.runtime import InProcessWorld

pipe = pipeline(torch.nn.Linear(2, 2), (torch.ones(2, 2),), stages=1)

def schedule(comm):
    return ScheduleGPipe(pipe.build_stage(0, comm=comm), 2, torch.nn.functional.mse_loss)

(one,), (other,) = InProcessWorld(1).run(schedule), InProcessWorld(1).run(schedule)
before = resident()
take_and_free()
print(resident() - before > 190 * 2**20, end=" ")
END_OF_ONE
print(resident() - before > 190 * 2**20, end=" ")
END_OF_OTHER
print(resident() - before > 100 * 2**20)
"""


def run(script: str, **variables: str) -> str:
    """What a new process prints, with no other settings of malloc than these."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    result = subprocess.run(
        [sys.executable, "-c", f"{_MAPPED}{script}\nprint(is_given_back())"],
        env=own | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("script", [_AFTER_A_BLOCK, _IN_A_SCHEDULE, _WHERE_COSTS_ARE_MEASURED])
def test_large_blocks_are_kept(script: str) -> None:
    """Blocks were given back to the system and taken anew, page by page, in each step: a third of what the
    first stage's forward passes of a small ResNet took under GPipe.
    """
    assert run(script) == "False"


def test_what_the_user_has_set_stays() -> None:
    assert run(_AFTER_A_BLOCK, MALLOC_MMAP_THRESHOLD_="65536") == "True"


@pytest.mark.parametrize(
    ("end", "last"), [("one.close(); one.close()", "other.close()"), ("del one", "del other")]
)
def test_all_that_steps_free_is_kept_until_the_last_schedule_is_closed(end: str, last: str) -> None:
    """A Llama of 6 layers took 220 MB from the system anew in each step under GPipe: a tenth of the step."""
    said = run(_KEPT_AND_GIVEN_BACK.replace("END_OF_ONE", end).replace("END_OF_OTHER", last))
    assert said.split() == ["True", "True", "False", "False"]


def test_nothing_is_kept_where_the_user_has_set_the_allocator() -> None:
    said = run(_KEPT_AND_GIVEN_BACK.replace("END_OF_O", "# O"), MALLOC_TRIM_THRESHOLD_="131072")
    assert said.split()[0] == "False"
