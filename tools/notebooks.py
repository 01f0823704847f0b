"""Runs the notebooks of the docs and stores what their code prints: ``python -m tools.notebooks [NAME...]``.

A notebook is a page with code that runs without a kernel: plain Python, whose outputs are what it prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"


def printed_by_cells(notebook: dict[str, Any]) -> list[str]:
    """Run the cells of code one after the other and return what each prints."""
    names: dict[str, Any] = {"__name__": "__notebook__"}
    texts = []
    for number, cell in enumerate(code_cells(notebook), 1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
        texts.append(printed.getvalue())
    return texts


def stored(notebook: dict[str, Any]) -> list[str]:
    """What each cell of code printed when it was stored."""
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in code_cells(notebook)]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def main() -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        texts = printed_by_cells(notebook)
        for number, (cell, text) in enumerate(zip(code_cells(notebook), texts, strict=True), 1):
            cell["execution_count"] = number
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {len(texts)} cells")


if __name__ == "__main__":
    main()
