"""Every message on the page of errors is one that the code can raise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
TORCHS = ("one of the variables needed for gradient computation has been modified by an inplace operation",)


def _text(node: ast.expr) -> str:
    """A message with ``…`` for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "…"


MESSAGES = {
    _text(node)
    for path in (ROOT / "src").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, (ast.JoinedStr, ast.Constant, ast.BinOp))
}


@pytest.mark.parametrize("heading", [heading for heading in HEADINGS if heading not in TORCHS])
def test_a_message_on_the_page_is_in_the_code(heading: str) -> None:
    parts = heading.split("…")
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    assert any(pattern.search(message) for message in MESSAGES if all(part in message for part in parts))


def test_each_section_has_a_cause_and_a_cure() -> None:
    sections = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == len(HEADINGS) >= 25
    for section in sections:
        assert "**Cause.**" in section, section
        assert "**Cure.**" in section, section
