"""Each package says what it exports, sorted, and exports what it says."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import partita

PACKAGES = (
    "partita",
    "partita.capture",
    "partita.cudagraphs",
    "partita.ddp",
    "partita.errors",
    "partita.fsdp",
    "partita.pipelining",
    "partita.pipelining.checkpoints",
    "partita.pipelining.decoding",
    "partita.pipelining.frontends.cuts",
    "partita.pipelining.stages",
    "partita.pipelining.training",
    "partita.planning",
    "partita.reporting",
    "partita.runtime",
    "partita.splitter",
    "partita.verification",
)


@pytest.mark.parametrize("name", PACKAGES)
def test_exports_are_sorted_and_exist(name: str) -> None:
    module = import_module(name)
    exports = module.__all__
    constants_first = sorted(
        exports, key=lambda export: (not export.isupper(), not export[0].isupper(), export)
    )
    assert list(exports) in (sorted(exports), constants_first)
    assert len(set(exports)) == len(exports)
    for export in exports:
        assert getattr(module, export) is not None, f"{name}.{export}"


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_have_a_docstring(name: str) -> None:
    module = import_module(name)
    for export in module.__all__:
        value = getattr(module, export)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name}.{export} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        partita.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["partita", "partita.planning", "partita.errors"])
def test_light_packages_import_no_torch(name: str) -> None:
    code = f"import sys, {name}; sys.exit(any(m == 'torch' or m.startswith('torch.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    source = Path(partita.__file__).parent
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(source)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert not shared
