"""The pages of the docs hang together: nothing is missing in the navigation, no link leads nowhere, and
notebooks print what is stored in them. ``make docs`` builds the site itself, with warnings as errors.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tools.notebooks import FOLDER as NOTEBOOKS
from tools.notebooks import printed_by_cells, stored

import partita

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
NAVIGATION = re.findall(
    r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)(?:\{[^}]*\})?")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """As GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).lower()) for text in headings
    )
    return {text.strip().replace(" ", "-") for text in plain}


def test_every_page_is_in_the_navigation() -> None:
    made = {f"notebooks/{path.stem}.md" for path in NOTEBOOKS.glob("*.ipynb")}
    made |= {name for name in NAVIGATION if name.startswith("reference/")}
    assert sorted(NAVIGATION) == sorted({path.name for path in DOCS.glob("*.md")} | made)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "notebooks/" in path:
            target = target.with_suffix(".ipynb")
        assert target.is_file(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*/*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_whole_and_fetch_nothing(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.dear
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    if "transformers" in str(notebook) and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install 'partita[hf]'")
    assert printed_by_cells(notebook) == stored(notebook), "python -m tools.notebooks stores them anew"


def test_the_citation_names_this_version() -> None:
    assert f"version: {partita.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
