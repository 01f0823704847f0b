"""Texts that an automatic re-wrap breaks are hard to read and to search for: strings over several lines,
comments and docstrings take no more lines than they need, and no call is stretched to carry a comment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").splitlines()
    for folder in ("src", "tests", "benchmarks", "examples", "tools")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)  # it shows what is broken
}
WIDTH = 110
SLACK = 20
"""So many columns may stay empty at the end of a line."""
PART = re.compile(r'(?P<indent> *)f?"(?P<text>(?:[^"\\{]|\\.|\{\{|\{[^{}"]*\})*)"(?P<end>[^\w"]*)')
"""One line that is nothing but a part of a string."""
WORD = re.compile(r"(?:\{[^{}]*\}|[^ {]|\{\{)* ?")
"""With what is put into an f-string whole."""
BORDERS = (":", ".", ",", ";", "]")
"""A phrase of its own may end a line of a string early."""
DRAWN = re.compile(r"[│├└|]|  |->|^[-*>+#]|^\w+: |^partita \w")
"""Drawings, tables, lists, examples and commands have lines of their own."""
CLOSING = re.compile(r" *[)\]}]+[:,]?  # (?!fmt|noqa|type)")


def _strings(lines: Sequence[str]) -> Iterator[tuple[int, list[re.Match[str]]]]:
    """The number of its first line, and the parts of each string over several lines."""
    parts: list[re.Match[str]] = []
    for number, line in enumerate([*lines, ""]):
        part = PART.fullmatch(line) if '"' in line else None
        goes_on = bool(parts) and not parts[-1]["end"]
        if part is None or not (goes_on and parts[-1]["indent"] == part["indent"]):
            if len(parts) > 1:
                yield number - len(parts) + 1, parts
            parts = []
        if part is not None:
            parts.append(part)


def _lines_needed(parts: Sequence[re.Match[str]]) -> int:
    width = WIDTH - len(parts[0]["indent"]) - len('f""')
    words = WORD.findall("".join(part["text"] for part in parts).replace("\\n", "\\n "))
    needed, used = 1, 0
    for word, after in pairwise(words):  # the last one is empty
        wanted = len(word) + (0 if after else len(parts[-1]["end"]))
        if used and (used + wanted > width or word.startswith("\\n")):
            needed, used = needed + 1, 0
        used += len(word)
        if "\\n" in word:
            used = width
    return needed


def _ends_early(part: re.Match[str], after: re.Match[str]) -> bool:
    """Whether a part is a single word, or would have had space for the first word of the next."""
    text, first = part["text"].rstrip(), WORD.match(after["text"])
    assert first is not None
    is_word = len(text) > 1 and " " not in text and part["text"] != text
    if text.endswith("\\n") or first[0].startswith("\\n"):
        return False
    has_space = WIDTH - len(part[0]) - len(first[0]) > SLACK
    return is_word or (has_space and not text.endswith(BORDERS))


def broken_strings(lines: Sequence[str]) -> Iterator[int]:
    for number, parts in _strings(lines):
        if _lines_needed(parts) < len(parts):
            yield number
        else:
            yield from (number + i for i, pair in enumerate(pairwise(parts)) if _ends_early(*pair))


def broken_comments(lines: Sequence[str]) -> Iterator[int]:
    """A line of one word below another line of the comment."""
    for number, (line, after) in enumerate(pairwise(lines), 2):
        words = after.split()
        is_word = len(words) == 2 and words[0] == "#" and not DRAWN.search(words[1])
        if is_word and line.startswith(after[: after.index("#") + 2]):
            yield number


def broken_docstrings(lines: Sequence[str]) -> Iterator[int]:
    """A line in a sentence that would have had space for the first word of the next."""
    inside = is_docstring = False
    for number, (line, after) in enumerate(pairwise(lines), 1):
        text, goes_on = line.strip(), after.strip()
        if line.count('"""') == 1:
            inside = not inside
            is_docstring = inside and text.startswith(('"""', 'r"""'))
        if not (is_docstring and text[-1:].isalpha() and goes_on[:1].islower()) or goes_on.endswith('"""'):
            continue
        same_indent = line[: -len(text)] == after[: -len(goes_on)]
        early = WIDTH - len(line) - len(goes_on.split()[0]) > SLACK
        if same_indent and early and not DRAWN.search(text.lstrip('r"')) and not DRAWN.search(goes_on):
            yield number


def stretched_calls(lines: Sequence[str]) -> Iterator[int]:
    """Three lines for what fits in one, since a comment stands behind the closing bracket."""
    for number, (line, inside, closing) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), 1):
        if CLOSING.match(closing) and line.endswith(("(", "[", "{")) and not inside.endswith(","):
            code = closing.partition("  #")[0].strip()
            if len(line) + len(inside.strip()) + len(code) <= WIDTH:
                yield number


CHECKS: tuple[Callable[[Sequence[str]], Iterator[int]], ...] = (
    broken_strings,
    broken_comments,
    broken_docstrings,
    stretched_calls,
)


@pytest.mark.parametrize(
    ("check", "text", "expected"),
    [
        (broken_strings, ["x = (", '    f"the piece {name} "', '    "is "', '    "too large"', ")"], [2]),
        (broken_strings, ["x = (", f'    f"{"word " * 20}"', '    f"{name} is too large"', ")"], []),
        (broken_strings, ["x = [", '    "one",', '    "two",', "]"], []),
        (broken_strings, ["x = (", r'    "a,b\n"', r'    "c\n"', ")"], []),
        (
            broken_strings,
            [f'"{"word " * 20}"', '"word, "', f'"{"word " * 20}"', f'"{"word " * 18}"'],
            [1],
        ),
        (
            broken_comments,
            ["x = 1", "# What is said of x in a line that is full, and in a", "# word.", "y"],
            [3],
        ),
        (broken_comments, ["# a", "", "# b"], []),
        (broken_docstrings, ['"""Words that a line', "ends too early, and more of them.", '"""'], [1]),
        (broken_docstrings, ['"""Words that end a sentence.', "and", '"""', "words", "words"], []),
        (stretched_calls, ["call(", "    x", ")  # why"], [1]),
        (stretched_calls, ["call(", "    x,", ")  # fmt: skip"], []),
    ],
)
def test_each_check_finds_what_is_broken(
    check: Callable[[Sequence[str]], Iterator[int]], text: list[str], expected: list[int]
) -> None:
    assert list(check(text)) == expected


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_text_was_broken_by_a_rewrap(check: Callable[[Sequence[str]], Iterator[int]]) -> None:
    broken = [f"{path}:{number}" for path, lines in SOURCES.items() for number in check(lines)]
    assert not broken, "\n".join(broken)


def test_every_package_says_what_it_is() -> None:
    silent = [
        path for path, lines in SOURCES.items() if path.endswith("__init__.py") and "Placeholder" in lines
    ]
    assert not silent


LONG_BODY = 40
"""Lines. A longer body says with at least two comments what its phases are."""


def _uncommented_long_bodies(source: str) -> Iterator[tuple[int, str]]:
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        body = function.body[1:] if ast.get_docstring(function) else function.body
        if not body or (end := function.end_lineno or 0) - body[0].lineno < LONG_BODY:
            continue
        comments = [line for line in lines[body[0].lineno - 2 : end] if line.lstrip().startswith("# ")]
        if len(comments) < 2:
            yield function.lineno, function.name


def test_long_bodies_are_seen() -> None:
    body = "".join(f"    a = {number}\n" for number in range(LONG_BODY))
    assert not list(_uncommented_long_bodies(f"def short():\n{body}"))
    assert list(_uncommented_long_bodies(f"def long():\n    # One.\n{body}    b = 1\n")) == [(1, "long")]
    assert not list(_uncommented_long_bodies(f"def long():\n    # One.\n{body}    # Two.\n    b = 1\n"))


def test_long_bodies_name_their_phases() -> None:
    bodies = [
        f"{name}:{line} {function}"
        for name, lines in SOURCES.items()
        if name.startswith("src")
        for line, function in _uncommented_long_bodies("\n".join(lines))
    ]
    assert not bodies, f"functions of over {LONG_BODY} lines without a comment for each phase: {bodies}"
