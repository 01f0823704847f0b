"""What is run: a callable, and the state that it holds."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch

from partita.errors import ArgumentTypeError

__all__ = [
    "PieceLike",
    "Root",
    "SplitLike",
    "Subject",
    "holds_state",
    "is_empty",
    "state_globals",
    "subject_of",
]


Root: TypeAlias = torch.nn.Module | torch.Tensor | torch.Generator


class PieceLike(Protocol):
    """What `verify` needs of a piece of a split."""

    @property
    def name(self) -> str:
        """The name of its submodule in the stitched module."""

    @property
    def module(self) -> torch.fx.GraphModule:
        """The graph of the piece; its nodes keep the names that they had in the whole."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes of the whole that run in this piece."""


@runtime_checkable
class SplitLike(Protocol):
    """What `verify` needs of a split: the stitched module and its pieces."""

    @property
    def module(self) -> torch.fx.GraphModule:
        """The stitched module, which calls the pieces."""

    @property
    def pieces(self) -> tuple[PieceLike, ...]:
        """The pieces, in the order in which they run."""


@dataclass(frozen=True)
class Subject:
    """A callable and the state that it holds.

    Attributes:
        call: what is called with the arguments.
        roots: the modules, free tensors and random generators that the state is read from, each with the
            prefix of its names.
    """

    call: Callable[..., Any]
    roots: tuple[tuple[str, Root], ...]


def subject_of(value: Any) -> Subject:
    """Find the state that a module, a split or any other callable holds.

    A function holds the modules, tensors and random generators that it closes over, has as defaults or reads
    from its file's globals, directly or through lists, dicts, partials, methods, objects and functions of the
    same file.

    Raises:
        ArgumentTypeError: ``value`` can't be called.
    """
    if not isinstance(value, torch.nn.Module) and isinstance(value, SplitLike):
        value = value.module
    if not callable(value):
        raise ArgumentTypeError(f"can't run a {type(value).__name__}: give a module, a split or a function")
    found = _state_in(value)
    modules = [name for name, root in found if isinstance(root, torch.nn.Module)]
    # One module is the state: its names are its own, whatever the function calls it.
    plain = modules[0] if len(modules) == 1 else None
    roots = tuple(("" if name == plain else name, root) for name, root in found)
    return Subject(value, roots)


def holds_state(value: Any) -> bool:
    """Whether a module, tensor or random generator can be reached from ``value``."""
    return bool(_state_in(value))


def state_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals that a function (or one written inside it) reads and that may hold state."""
    codes, names = [function.__code__], list[str]()
    while codes:
        code = codes.pop()
        names.extend(name for name in code.co_names if name in function.__globals__)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    wanted = (Root, functools.partial, types.MethodType, list, tuple, dict)
    found = {}
    for name in names:
        held = function.__globals__[name]
        # Functions of other files are taken to hold nothing: following them would walk through whole
        # libraries.
        local = isinstance(held, types.FunctionType) and held.__globals__ is function.__globals__
        if (local or isinstance(held, wanted)) and not name.startswith("__"):
            found[name] = held
    return found


def is_empty(cell: types.CellType) -> bool:
    """Whether a closure's cell has not been filled yet."""
    try:
        cell.cell_contents  # noqa: B018 (reading is the only way to ask)
    except ValueError:
        return True
    return False


def _state_in(value: Any) -> list[tuple[str, Root]]:
    """Everything that is state and can be reached, each once, with its path; modules are not looked into."""
    found: list[tuple[str, Root]] = []
    seen: set[int] = set()
    waiting = [("", value)]
    while waiting:
        name, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Root):
            found.append((name, held))
            continue
        parts = [(".".join(filter(None, (name, part))), inner) for part, inner in _parts(held)]
        waiting.extend(reversed(parts))
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type | types.ModuleType | torch.fx.Graph | torch.fx.Node):
        return
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((str(i), argument) for i, argument in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, SplitLike):
        yield "", value.module
    else:
        yield from getattr(value, "__dict__", {}).items()


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if not is_empty(cell):
            yield name, cell.cell_contents
    yield from ((f"default{i}", value) for i, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    if not str(function.__globals__.get("__name__", "")).startswith("torch."):
        yield from state_globals(function).items()
