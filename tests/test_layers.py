"""Imports go down the layers only, and only ``_torch`` touches what torch does not document."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "partita"
# Each may import what stands on an earlier line. Those on one line never import each other.
LAYERS = (
    ("_version", "errors"),
    ("_torch",),
    ("graph",),
    ("splitter",),
    ("verification",),
    ("capture",),
    ("planning",),
    ("runtime",),
    ("ddp", "pipelining", "cudagraphs", "fsdp"),
    ("reporting",),
    ("demo",),
    ("cli",),
)
# Likewise within `pipelining`; what lies beside these folders stands below them all.
PIPELINING = ("stages", "blocks", "steps", "cutting", "checkpoints")
# These show what is below under torch's names, as `__init__` does under the package's.
FACES = ("_IR", "__init__", "_backward", "_utils", "microbatch", "schedules", "stage")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(SOURCE.rglob("*.py"))
PRIVATE = (
    "torch._",
    "torch.utils._",
    "torch.fx._",
    "torch.nn._",
    "torch.autograd._",
    "torch.cuda._",
    "torch.distributed._",
    "torch.distributed.distributed_c10d",
    "torch.export._",
)


def layer_of(path: Path) -> str:
    """The folder of the package that a file lies in, or its own name at the top."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every absolute module name that a file imports, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_the_layers(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return  # the package itself loads its names on first use
    for name, line in imported(path):
        parts = name.split(".")
        if parts[0] != "partita" or len(parts) < 2 or parts[1] == layer:
            continue
        assert parts[1] in LEVEL, f"{path}:{line} imports {name}, which has no layer"
        assert LEVEL[parts[1]] < LEVEL[layer], (
            f"{path}:{line}: {layer} imports {parts[1]}, which is not below it"
        )


@pytest.mark.parametrize("path", sorted((SOURCE / "pipelining").rglob("*.py")), ids=lambda path: path.stem)
def test_imports_go_down_within_pipelining(path: Path) -> None:
    folder = path.parent.name
    if folder == "pipelining" and path.stem in FACES:
        return
    own = -1 if folder == "pipelining" else PIPELINING.index(folder)
    for name, line in imported(path):
        parts = name.split(".")
        if parts[:2] == ["partita", "pipelining"] and len(parts) > 2:
            other = PIPELINING.index(parts[2]) if parts[2] in PIPELINING else -1
            assert other <= own, f"{path}:{line}: {folder} imports {parts[2]}, which is not below it"


def test_every_folder_has_a_layer() -> None:
    folders = {layer_of(path) for path in FILES} - {"__init__"}
    assert folders <= LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_one_folder_imports_private_torch(path: Path) -> None:
    if layer_of(path) == "_torch":
        return
    private = [(name, line) for name, line in imported(path) if name.startswith(PRIVATE)]
    assert not private, f"{path} imports {private}: put it behind a function in partita/_torch"


def test_the_planner_imports_nothing_but_itself_and_the_standard_library() -> None:
    for path in sorted((SOURCE / "planning").rglob("*.py")):
        for name, line in imported(path):
            assert not name.startswith(("torch", "numpy", "rich", "typer", "jinja2")), (
                f"{path}:{line} imports {name}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_stand_at_the_top(path: Path) -> None:
    if layer_of(path) == "_torch":
        return
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = [
                node.lineno for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom))
            ]
            assert not inside, f"{path}:{inside} imports inside {function.name}"
