"""Nothing in the sources is carried over from torch, line for line."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

SOURCE = Path(__file__).parent.parent / "src"
TORCH = Path(torch.__file__).parent
PARTS = ("fx", "_dynamo", "distributed", "_functorch", "_inductor", "cuda", "export", "nn/parallel")
RUN = 5
"""So many lines in a row, with hardly a trivial one among them, are no accident."""
TRIVIAL = re.compile(r"[\W_]*|(else|try|finally):|return|pass|continue|break|(from|import) .*|@\w+|\w+,")

CODE = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^#])*""")


def statements(path: Path) -> list[tuple[int, str]]:
    """Numbered lines of code without comments, docstrings, blank lines and indentation."""
    text = path.read_text(encoding="utf-8")
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in strings that are not ours
            tree = ast.parse(text)
    except SyntaxError:
        return []
    hidden = {
        number
        for node in all_statements(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return [
        (number, code)
        for number, line in enumerate(text.splitlines(), 1)
        if number not in hidden and (code := " ".join(before_comment(line).split()))
    ]


def all_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement in a file, a class, a function or a block; expressions are not looked into."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from all_statements(inner)


def before_comment(line: str) -> str:
    """The line up to a `#` that stands in no string of this line."""
    return CODE.match(line)[0] if "#" in line else line  # type: ignore[index]


def runs(lines: list[tuple[int, str]]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every window of `RUN` lines that says something."""
    codes = [code for _, code in lines]
    trivial = [TRIVIAL.fullmatch(code) is not None for code in codes]
    for start in range(len(lines) - RUN + 1):
        if sum(trivial[start : start + RUN]) <= 1:
            yield lines[start][0], tuple(codes[start : start + RUN])


def may_share(path: Path, windows: Mapping[str, list[tuple[str, ...]]]) -> bool:
    """Whether a file has, in any order, all the lines of one of these windows: that is cheap to tell.

    Args:
        windows: by their first line.
    """
    text = path.read_text(encoding="utf-8")
    lines = {" ".join(before_comment(line).split()) for line in text.splitlines()}
    return any(lines.issuperset(window) for first in lines & windows.keys() for window in windows[first])


def test_no_run_of_lines_stands_in_torch() -> None:
    ours = {
        window: f"{path}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, window in runs(statements(path))
    }
    assert len(ours) > 1000
    by_first: dict[str, list[tuple[str, ...]]] = {}
    for window in ours:
        by_first.setdefault(window[0], []).append(window)
    copied = [
        f"{ours[window]} == torch/{path.relative_to(TORCH)}:{number}"
        for part in PARTS
        for path in sorted((TORCH / part).rglob("*.py"))
        if may_share(path, by_first)
        for number, window in runs(statements(path))
        if window in ours
    ]
    assert not copied, "\n".join(copied)


def test_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text('def f():  # why\n    """What.\n\n    More.\n    """\n    # how\n    return  "#"  # so\n')
    assert statements(path) == [(1, "def f():"), (7, 'return "#"')]
