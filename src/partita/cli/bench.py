"""``partita bench``: run one of the measurements in the folder ``benchmarks``."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from partita.errors import UsageError

__all__ = ["bench", "benchmark_names", "find_benchmarks"]


def bench(
    name: Annotated[str | None, typer.Argument(help="Which one; without it, all names are listed.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: whether it runs, not how fast.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
) -> None:
    """Measure one thing against its rivals, in one run, and print the ratio."""
    folder = find_benchmarks(Path.cwd(), Path(__file__))
    names = benchmark_names(folder)
    if name is None:
        width = max(map(len, names), default=0)
        for benchmark, question in names.items():
            print(f"{benchmark:<{width}}  {question}")
        return
    name = name.replace("_", "-")
    if name not in names:
        raise UsageError(f"no benchmark is called {name!r}; there are: {', '.join(names)}")
    sys.path.insert(0, str(folder.parent))
    try:
        module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
        module.main(quick=quick, json_path=json_path)
    finally:
        sys.path.remove(str(folder.parent))


def find_benchmarks(directory: Path, this_file: Path) -> Path:
    """Return the folder ``benchmarks`` of the current directory, or of the checkout that partita runs from.

    Raises:
        UsageError: there is none; an installed package does not carry them.
    """
    candidates = [
        directory / "benchmarks",
        *(parent / "benchmarks" for parent in this_file.resolve().parents[:4]),
    ]
    for folder in candidates:
        if (folder / "harness.py").is_file():
            return folder
    raise UsageError(
        f"there is no folder 'benchmarks' in {directory}: benchmarks are part of the source, not of "
        "the installed package; clone the repository and call this in it"
    )


def benchmark_names(folder: Path) -> dict[str, str]:
    """Return each benchmark of a folder with the first line of its docstring, importing nothing.

    A benchmark is called ``pipeline-overhead`` where its file is ``pipeline_overhead.py``.
    """
    questions = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(item, ast.FunctionDef) and item.name == "main" for item in tree.body):
            questions[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return questions
