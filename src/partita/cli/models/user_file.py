"""``model.py:build``: a function in a user's file that makes a model and example arguments.

The function takes nothing and returns ``(model, args)`` or ``(model, args, kwargs)``: an ``nn.Module``, a
tuple of positional arguments, and a dict of keyword arguments::

    def build():
        return torch.nn.Linear(4, 2), (torch.ones(3, 4),)
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from partita.errors import UsageError

__all__ = ["Built", "build_from"]

_RETURNS = "it returns (model, args) or (model, args, kwargs): an nn.Module, a tuple and a dict"


@dataclass(frozen=True)
class Built:
    """A model and example arguments, as the user's function returned them."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def build_from(place: str) -> Built:
    """Import a file and call a function of it.

    The file's folder is on ``sys.path`` from then on, so that it can import its neighbours.

    Args:
        place: ``path/to/file.py:name``.

    Raises:
        UsageError: no such file or name, an error in either, or a result of another kind.
    """
    path, function = _find_function(place)
    try:
        result = function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{place} raised {_describe(error, path)}") from error
    return _checked(place, result)


def _find_function(place: str) -> tuple[Path, Callable[[], Any]]:
    file, colon, name = place.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UsageError(
            f"{place!r} names no function: write FILE.py:NAME, such as model.py:build; a model of "
            "Hugging Face is hf:TYPE, hf:FOLDER or --config-json FILE"
        )
    path = Path(file)
    if not path.is_file():
        raise UsageError(
            f"there is no file {file!r} (looked in {Path.cwd()}): give the path of a Python file"
        )
    if path.suffix != ".py":
        raise UsageError(f"{file!r} is no Python file: its name has to end in .py")
    module = _import_file(path)
    if not hasattr(module, name):
        functions = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        )
        listed = f"it defines {', '.join(functions)}" if functions else "it defines no function"
        raise UsageError(f"{file} has no {name!r}: {listed}")
    function = getattr(module, name)
    if not callable(function) or isinstance(function, nn.Module):
        raise UsageError(
            f"{place} is a {type(function).__name__} and no function: write one, such as `def build():`; "
            f"{_RETURNS}"
        )
    return path, function


def _import_file(path: Path) -> ModuleType:
    name = f"partita_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} can't be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be found again by name
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UsageError(f"{path} can't be imported: {_describe(error, path)}") from error
    return module


def _checked(place: str, result: Any) -> Built:
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise UsageError(f"{place} returned a {type(result).__name__}{size}: {_RETURNS}")
    model, args, kwargs = (*result, {})[:3]
    for what, value, kind in (("model", model, nn.Module), ("args", args, tuple), ("kwargs", kwargs, dict)):
        if not isinstance(value, kind):
            raise UsageError(
                f"{place} returned {what} of type {type(value).__name__}, not {kind.__name__}: {_RETURNS}"
            )
    return Built(model, args, kwargs)


def _describe(error: BaseException, path: Path) -> str:
    """Return the error, and the last line of the user's file that led to it."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path
    ]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {error}{where}"
