"""``model.py:build``: what is wrong with it is said in one message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from partita.cli.models.user_file import build_from
from partita.errors import UsageError

GOOD = """
import torch
from neighbour import WIDTH

def build():
    return torch.nn.Linear(WIDTH, 2), (torch.ones(3, WIDTH),)

def with_keywords():
    return torch.nn.Linear(4, 2), (), {"input": torch.ones(3, 4)}

def bare():
    return torch.nn.Linear(4, 2)

def one_tensor():
    return torch.nn.Linear(4, 2), torch.ones(3, 4)

def raises():
    return torch.ones(2) @ torch.ones(3)

def leaves():
    raise SystemExit(3)

number = 3
layer = torch.nn.Linear(4, 2)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "neighbour.py").write_text("WIDTH = 4\n")
    path = tmp_path / "model.py"
    path.write_text(GOOD)
    return path


def test_a_model_and_its_arguments_come_back(file: Path) -> None:
    built = build_from(f"{file}:build")
    assert isinstance(built.model, torch.nn.Linear)
    assert built.model(*built.args, **built.kwargs).shape == (3, 2)
    assert build_from(f"{file}:with_keywords").kwargs["input"].shape == (3, 4)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("model.py", "'model.py' names no function: write FILE.py:NAME, such as model.py:build"),
        ("org/llama", "a model of Hugging Face is hf:TYPE, hf:FOLDER or --config-json FILE"),
        (":build", "':build' names no function"),
        ("model.py:", "'model.py:' names no function"),
        ("nowhere.py:build", "there is no file 'nowhere.py'"),
        ("FILE:bild", "has no 'bild': it defines bare, build, leaves, one_tensor, raises, with_keywords"),
        ("FILE:number", r"is a int and no function: write one, such as `def build\(\):`; it returns"),
        ("FILE:layer", r"is a Linear and no function: write one"),
        ("FILE:bare", r"returned a Linear: it returns \(model, args\) or \(model, args, kwargs\)"),
        ("FILE:one_tensor", "returned args of type Tensor, not tuple"),
        ("FILE:raises", r"raised RuntimeError: .*\(line 18\)"),
        ("FILE:leaves", r"raised SystemExit: 3 \(line 21\)"),
    ],
)
def test_what_can_not_be_used_is_refused(file: Path, place: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_from(place.replace("FILE", str(file)))


def test_a_file_that_can_not_be_imported_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nimport no_such_module_at_all\n")
    with pytest.raises(UsageError, match=r"can't be imported: ModuleNotFoundError: .*\(line 2\)"):
        build_from(f"{broken}:build")
    text = tmp_path / "model.txt"
    text.write_text("x = 1")
    with pytest.raises(UsageError, match=re.escape("is no Python file: its name has to end in .py")):
        build_from(f"{text}:build")
