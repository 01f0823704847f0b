"""Strings over several lines take no more lines than they need: a shorter one was broken by a re-wrap, and
is hard to read and to search for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

import partita

SOURCES = sorted(Path(partita.__file__).parent.rglob("*.py"))
WIDTH = 110
PART = re.compile(r'(?P<indent> *)f?"(?P<text>(?:[^"\\{]|\\.|\{\{|\{[^{}"]*\})*)"(?P<end>[^\w"]*)')
"""One line that is nothing but a part of a string."""
WORD = re.compile(r"(?:\{[^{}]*\}|[^ {]|\{\{)* ?")
"""With what is put into an f-string whole."""


def _strings(lines: Sequence[str]) -> Iterator[tuple[int, list[re.Match[str]]]]:
    """The number of its first line, and the parts of each string over several lines."""
    parts: list[re.Match[str]] = []
    for number, line in enumerate([*lines, ""]):
        part = PART.fullmatch(line)
        goes_on = bool(parts) and not parts[-1]["end"]
        if part is None or not (goes_on and parts[-1]["indent"] == part["indent"]):
            if len(parts) > 1:
                yield number - len(parts) + 1, parts
            parts = []
        if part is not None:
            parts.append(part)


def _lines_needed(parts: Sequence[re.Match[str]]) -> int:
    room = WIDTH - len(parts[0]["indent"]) - len('f""')
    words = WORD.findall("".join(part["text"] for part in parts))
    needed, used = 1, 0
    for word, after in pairwise(words):  # the last one is empty
        wanted = len(word) + (0 if after else len(parts[-1]["end"]))
        if used and (used + wanted > room or word.startswith("\\n")):
            needed, used = needed + 1, 0
        used += len(word)
        if "\\n" in word:
            used = room
    return needed


def _broken(lines: Sequence[str]) -> list[int]:
    return [number for number, parts in _strings(lines) if _lines_needed(parts) < len(parts)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (["x = (", '    f"the piece {name} "', '    "is "', '    "too large"', ")"], [2]),
        (["x = (", f'    "{"word " * 20}"', '    f"{name} is too large"', ")"], []),
        (["x = [", '    "one",', '    "two",', "]"], []),
    ],
)
def test_the_check_finds_what_is_broken(text: list[str], expected: list[int]) -> None:
    assert _broken(text) == expected


def test_no_string_was_broken_by_a_rewrap() -> None:
    broken = [f"{path}:{number}" for path in SOURCES for number in _broken(path.read_text().splitlines())]
    assert not broken, "\n".join(broken)


def test_every_package_says_what_it_is() -> None:
    silent = [path for path in SOURCES if path.name == "__init__.py" and "Placeholder" in path.read_text()]
    assert not silent
