"""What ``ARCHITECTURE.md`` names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PLACES = {
    str(path.relative_to(ROOT / "src").with_suffix("")): path
    for path in (ROOT / "src" / "partita").rglob("*")
    if path.suffix == ".py" or path.is_dir()
}
NAMED = sorted({name.removesuffix("/") for name in re.findall(r"`([a-z_]+/[a-z_/.]*)`", PAGE)})


def test_places_are_named() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize("name", NAMED)
def test_every_place_that_is_named_exists(name: str) -> None:
    place = name.removeprefix("src/").removesuffix(".py")
    assert (ROOT / name).exists() or any(f"/{existing}".endswith(f"/{place}") for existing in PLACES)


def test_the_drawing_has_every_room() -> None:
    drawing = PAGE.split("```")[1]
    for package in (
        "_torch",
        "capture",
        "cudagraphs",
        "ddp",
        "graph",
        "pipelining",
        "splitter",
        "verification",
    ):
        line = next(line for line in drawing.splitlines() if line.startswith(package))
        named = {room.split("/")[0] for room in re.findall(r"[a-z_/]+", line)}
        rooms = {path.parent.name for path in (ROOT / "src/partita" / package).glob("*/__init__.py")}
        assert rooms <= named, f"the drawing of {package} lacks {rooms - named}"
