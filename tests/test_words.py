"""Names say what a thing is in the field's words: a list of words that say nothing, or mean too much.

What the words of the project mean is in ``CONTRIBUTING.md``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "partita"
EMPTY = frozenset({"found", "given", "held", "known", "lent", "loan", "made", "plain", "told", "trust"})
"""A name that is one of these does not say what it is."""


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is given to something, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def empty_names(text: str) -> list[str]:
    """The names in a source that say nothing, or are about settling something, each with its line."""
    return [
        f"{line}: {name}"
        for name, line in sorted(_names(ast.parse(text)), key=lambda name_and_line: name_and_line[1])
        if name.strip("_").lower() in EMPTY or "settl" in name.lower()
    ]


def test_the_check_finds_names_that_say_nothing() -> None:
    text = "held = 1\nself._made = 2\ndef known(told): ...\nclass Settling: ..."
    assert empty_names(text) == ["1: held", "2: _made", "3: known", "3: told", "4: Settling"]
    assert empty_names("found_inf = is_plain_tensor(x)\nplain.x = known") == []


@pytest.mark.parametrize("folder", sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
def test_names_say_what_a_thing_is(folder: str) -> None:
    empty = [
        f"{path.relative_to(SOURCE)}:{name}"
        for path in sorted((SOURCE / folder).rglob("*.py"))
        for name in empty_names(path.read_text(encoding="utf-8"))
    ]
    assert not empty, "\n".join(empty)
