"""The training of docs/failures.md, started again by torchrun after one of its ranks was killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "failures.md"
LIMIT_S = 200.0
WITH_A_DEATH = """
import os, runpy, signal
import torch
import torch.distributed as dist
from partita.pipelining import Schedule1F1B

step, steps = Schedule1F1B.step, []

def dies(schedule, *args, **kwargs):
    steps.append(len(steps))
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and "undisturbed" not in os.environ and len(steps) == 4 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(schedule, *args, **kwargs)

Schedule1F1B.step = dies
torch.set_printoptions(precision=17)
runpy.run_path("train.py", run_name="__main__")
"""
OF_TORCH = """
import os
import torch.distributed as dist

store, _, _ = next(dist.rendezvous("env://"))
print("has the mark:", store.check(["mark"]))
store.set("mark", "")
os._exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
"""


def _torchrun(folder: Path, script: str, size: int, **variables: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    process = subprocess.run(
        [*command, "--max-restarts", "1", script],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.dear
@pytest.mark.timeout(2 * LIMIT_S)
def test_a_training_that_torchrun_starts_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(# torchrun.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    results = []
    for variables in ({}, {"undisturbed": "1"}):
        folder = tmp_path / f"run-{len(results)}"
        folder.mkdir()
        (folder / "train.py").write_text(block)
        (folder / "dies.py").write_text(WITH_A_DEATH)
        text = _torchrun(folder, "dies.py", 2, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **variables)
        results.append(sorted(re.findall(r"from step (\d): tensor\((.*?),", text)))
    disturbed, undisturbed = results
    assert [first for first, _ in disturbed] == ["2", "2"]
    assert [first for first, _ in undisturbed] == ["0", "0"]
    assert [total for _, total in disturbed] == [total for _, total in undisturbed]


@pytest.mark.dear
@pytest.mark.parametrize(("variable", "kept"), [("0", "True"), ("1", "False")])
def test_the_store_of_torchs_launcher_outlives_an_attempt_unless_it_is_told_not_to(
    tmp_path: Path, variable: str, kept: str
) -> None:
    """Gloo then reads the addresses of ranks that have ended: `init_process_group` fails, torch 2.13."""
    (tmp_path / "mark.py").write_text(OF_TORCH)
    text = _torchrun(tmp_path, "mark.py", 1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=variable)
    assert re.findall(r"has the mark: (\w+)", text) == ["False", kept]
