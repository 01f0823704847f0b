"""The examples in docstrings and in the README run."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
from tests.runtime import worlds

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)
BLOCKS = [
    block
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    if page.exists()
    for block in re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    result = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if "# torchrun" not in b], ids=lambda block: block.splitlines()[0][:40]
)
def test_python_examples_of_the_pages_run(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "example"})


FOR_TORCHRUN = [block for block in BLOCKS if "# torchrun" in block]


@pytest.mark.parametrize("block", FOR_TORCHRUN, ids=lambda block: block.splitlines()[0][2:60])
def test_examples_for_torchrun_run(block: str, tmp_path: Path) -> None:
    """Each in processes that have the imports done, and the environment that torchrun gives them; those of
    the README run with torchrun itself where the wheel is checked.
    """
    script = tmp_path / "train.py"
    script.write_text(block)
    (processes,) = re.findall(r"with (\d+) processes", block.splitlines()[0]) or ["2"]
    with worlds.patience(120.0):
        endings = worlds.script_endings(int(processes), script)
    for ending in endings:
        assert ending.error is None, ending.text
    assert "tensor(" in "".join(ending.result for ending in endings)
