"""Nothing in the sources is carried over from torch, line for line."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import torch

SOURCE = Path(__file__).parent.parent / "src"
TORCH = Path(torch.__file__).parent
PARTS = ("fx", "_dynamo", "distributed", "_functorch", "_inductor", "cuda", "export", "nn/parallel")
RUN = 5
"""So many lines in a row, with hardly a trivial one among them, are no accident."""
TRIVIAL = re.compile(r"[\W_]*|(else|try|finally):|return|pass|continue|break|(from|import) .*|@\w+|\w+,")


def statements(path: Path) -> list[tuple[int, str]]:
    """Numbered lines of code without comments, docstrings, blank lines and indentation."""
    text = path.read_text(encoding="utf-8")
    hidden: set[int] = set()
    comments: dict[int, int] = {}
    fresh = True
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    for token in tokens:
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.start[1]
        elif token.type == tokenize.STRING and fresh:
            hidden.update(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            fresh = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if number not in hidden and (code := " ".join(line[: comments.get(number)].split())):
            lines.append((number, code))
    return lines


def runs(lines: list[tuple[int, str]]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every window of `RUN` lines that says something."""
    for start in range(len(lines) - RUN + 1):
        window = tuple(code for _, code in lines[start : start + RUN])
        if sum(TRIVIAL.fullmatch(code) is None for code in window) >= RUN - 1:
            yield lines[start][0], window


def test_no_run_of_lines_stands_in_torch() -> None:
    ours = {
        window: f"{path}:{number}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, window in runs(statements(path))
    }
    assert len(ours) > 1000
    copied = [
        f"{ours[window]} == torch/{path.relative_to(TORCH)}:{number}"
        for part in PARTS
        for path in sorted((TORCH / part).rglob("*.py"))
        for number, window in runs(statements(path))
        if window in ours
    ]
    assert not copied, "\n".join(copied)
