"""The tree of errors: drawn as it is, catchable as expected, and able to travel between processes."""

from __future__ import annotations

import ast
import builtins
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita import errors

WARNINGS = ["CostlyCut", "LongCapture", "NotCompiled", "NotProven", "ReplicasDiffer"]
NAMES = [name for name in errors.__all__ if name not in ("PartitaError", *WARNINGS)]


def test_the_picture_shows_every_error_and_its_built_in() -> None:
    assert errors.__doc__ is not None
    drawn = dict(re.findall(r"[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__))
    assert set(drawn) == set(NAMES)
    for name, builtin in drawn.items():
        if builtin:
            assert issubclass(getattr(errors, name), getattr(builtins, builtin)), name


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_stands_below_the_picture(name: str) -> None:
    assert issubclass(getattr(errors, name), UserWarning)
    assert f"\n    {name} (UserWarning) " in str(errors.__doc__)


@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_a_partita_error_and_a_built_in(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.PartitaError)
    assert any(
        base.__module__ == "builtins" and base not in (object, Exception, BaseException)
        for base in error.__mro__
    )


@pytest.mark.parametrize(
    "error",
    [
        errors.PeerFailed("rank 1 failed", 1, "Traceback ..."),
        errors.OrderConflict("a cycle", ["a", "b"]),
        errors.PlanError("no"),
        errors.InfeasiblePlan("no; with 2 ranks", "no", {"ranks": 2}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: errors.PartitaError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


INTERNAL = {
    "checked_reader.py": "becomes a CheckpointError that names the file",
    "safetensors_files.py": "becomes a CheckpointError that names the index",
    "savers.py": "travels to the ranks that wait, where it becomes a CheckpointError",
    "waiters.py": "becomes the failure of the comm",
    "connections.py": "is told as a rank that is gone",
}
"""Files that raise built-ins which none of their callers lets through."""
PROTOCOLS = ("__getattr__", "__get__")
"""Python itself wants an AttributeError of these."""


def _raised(node: ast.AST, function: str = "") -> Iterator[tuple[str, str, int]]:
    """The name of each class that is raised by name, with the function around it and the line."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name
    if isinstance(node, ast.Raise) and node.exc is not None:
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        if isinstance(raised, ast.Name):
            yield raised.id, function, node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _raised(child, function)


def test_what_is_raised_on_purpose_is_a_partita_error() -> None:
    bare = []
    for path in Path(errors.__file__).parent.rglob("*.py"):
        if path.name in INTERNAL:
            continue
        for name, function, line in _raised(ast.parse(path.read_text(encoding="utf-8"))):
            kind = getattr(builtins, name, None)
            is_bare = isinstance(kind, type) and issubclass(kind, Exception)
            asks_for_it = kind is AttributeError and function in PROTOCOLS
            unreachable = kind is AssertionError
            if is_bare and not asks_for_it and not unreachable:
                bare.append(f"{path}:{line}: {name}")
    assert not bare, "\n".join(bare)


def test_a_name_that_is_no_piece_is_told_without_quotes() -> None:
    assert str(errors.PieceNameError("no piece called 'x'")) == "no piece called 'x'"
