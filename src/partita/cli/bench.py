"""``partita bench``: run one of the measurements in the folder ``benchmarks``."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Annotated

import typer

from partita.cli.output.output_files import check_outputs
from partita.errors import UsageError

__all__ = ["bench", "benchmark_names", "find_benchmarks"]


def bench(
    name: Annotated[str | None, typer.Argument(help="Which one; without it, all names are listed.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: whether it runs, not how fast.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Cells to measure, such as 'mlp/2/*', where the benchmark has cells."),
    ] = None,
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
    check_outputs({"--json": json_path})
    with _importable(folder.parent):
        module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
        if not only:
            module.main(quick=quick, json_path=json_path)
        elif "only" in inspect.signature(module.main).parameters:
            module.main(quick=quick, json_path=json_path, only=only)
        else:
            raise UsageError(f"the benchmark {name!r} has no cells to choose from: leave out --only")


@contextmanager
def _importable(parent: Path) -> Iterator[None]:
    """Let this process and those that it starts import from a folder, before all others."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(parent), *([before] if before else [])])
    sys.path.insert(0, str(parent))
    try:
        yield
    finally:
        sys.path.remove(str(parent))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def find_benchmarks(directory: Path, this_file: Path) -> Path:
    """Return the folder ``benchmarks`` of the current directory, of the checkout that partita runs from, or
    of the installed package.

    Raises:
        UsageError: there is none.
    """
    candidates = [
        directory / "benchmarks",
        *(parent / "benchmarks" for parent in this_file.resolve().parents[:4]),
        *_installed(),
    ]
    for folder in candidates:
        if (folder / "harness.py").is_file():
            return folder
    raise UsageError(
        f"there is no folder 'benchmarks' in {directory}, and none was installed with partita: call this in "
        "a checkout of the source, or install partita anew from its wheel"
    )


def _installed() -> Iterator[Path]:
    """The folder of the benchmarks among the files that were installed with partita."""
    with suppress(PackageNotFoundError):
        for path in files("partita") or ():
            if path.name == "harness.py" and path.parent.name == "benchmarks":
                yield Path(str(path.locate())).resolve().parent


def benchmark_names(folder: Path) -> dict[str, str]:
    """Return each benchmark of a folder with the first paragraph of its docstring, importing nothing.

    A benchmark is called ``pipeline-overhead`` where its file is ``pipeline_overhead.py``.
    """
    questions = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(item, ast.FunctionDef) and _is_benchmark(item) for item in tree.body):
            paragraph = (ast.get_docstring(tree) or "").partition("\n\n")[0]
            questions[path.stem.replace("_", "-")] = " ".join(paragraph.split())
    return questions


def _is_benchmark(function: ast.FunctionDef) -> bool:
    return function.name == "main" and "quick" in (argument.arg for argument in function.args.kwonlyargs)
