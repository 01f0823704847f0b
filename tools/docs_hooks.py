"""What the docs site has beyond the pages in ``docs``: a reference page for each package, of its docstrings,
and a page for each notebook, with the outputs that are stored in it.

mkdocs calls the functions named ``on_...``; see ``mkdocs.yml``.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).parent.parent / "src"
PARTS = {
    "integrations": ("accelerate", "transformers"),
    "pipelining": ("checkpoints", "training", "stages", "decoding", "frontends.cuts"),
}
"""Packages with names in modules of their own."""
PACKAGES = (
    "partita",
    "pipelining",
    "planning",
    "ddp",
    "cudagraphs",
    "fsdp",
    "splitter",
    "verification",
    "runtime",
    "reporting",
    "integrations",
    "errors",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for package in PACKAGES:
        files.append(File.generated(config, f"reference/{package}.md", content=reference_page(package)))
    for notebook in sorted((Path(config.docs_dir) / "notebooks").glob("*.ipynb")):
        page = notebook_page(notebook)
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
    return files


def reference_page(package: str) -> str:
    """The page of a package: what its ``__init__`` exports, then what its modules export beyond that."""
    module = "partita" if package == "partita" else f"partita.{package}"
    lines, shown = [f"# `{module}`", ""], set[str]()
    for name in (module, *(f"{module}.{part}" for part in PARTS.get(package, ()))):
        exports = [export for export in exported(name) if not export.startswith("__") and export not in shown]
        if not exports:
            continue
        shown |= set(exports)
        if name != module:
            lines += [f"## `{name}`", ""]
        lines += [
            f"::: {name}",
            "    options:",
            f"      heading_level: {2 if name == module else 3}",
            f"      members: [{', '.join(exports)}]",
            "",
        ]
    return "\n".join(lines)


def exported(module: str) -> list[str]:
    """The names in the ``__all__`` of a module, without importing it."""
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and what its code printed."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    link = f"[The notebook itself]({path.name}){{: download }} runs without a GPU and downloads nothing."
    parts = list(_cell_parts(cells))
    return "\n\n".join([parts[0], link, *parts[1:], ""])


def _cell_parts(cells: list[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield text
            continue
        yield f"```python\n{text}\n```"
        printed = "".join("".join(output["text"]) for output in cell["outputs"])
        if printed:
            yield f"```text\n{printed.rstrip()}\n```"
