"""The scripts in ``examples/`` run on two processes, and find themselves equal to the uncut model."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.worlds import patience, script_endings

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LIMIT_S = 170


def _with_torchrun(script: Path) -> str:
    """What it prints; the whole process group goes if it takes too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*command, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, text
    return text


def _run(script: Path) -> str:
    """What it prints, in processes that have the imports done, and the environment of torchrun's."""
    with patience(LIMIT_S):
        endings = script_endings(2, script)
    for ending in endings:
        assert ending.error is None, ending.text
        assert ending.exitcode == 0
    return "".join(ending.result for ending in endings)


def test_there_are_examples() -> None:
    assert {script.name for script in SCRIPTS} == {
        "generate_hf.py",
        "compiled.py",
        "gpt.py",
        "hugging_face.py",
        "planned.py",
        "trainer_hf.py",
        "translation_hf.py",
        "unet.py",
    }


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.dear  # what they show has tests of its own
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_ends_equal_to_the_uncut_model(script: Path) -> None:
    needs = {
        "generate_hf": ("transformers",),
        "hugging_face": ("transformers",),
        "trainer_hf": ("transformers", "accelerate"),
        "translation_hf": ("transformers",),
    }
    for name in needs.get(script.stem, ()):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'partita[hf]'")
    text = _with_torchrun(script) if script.stem == "gpt" else _run(script)
    if script.stem == "generate_hf":
        assert text.count("tokens, equal to the uncut model's") == 3
        return
    assert text.count("equal to the uncut model's, bit for bit") == 2
    assert "loss" in text
