"""What is compared: a callable, and the state that it refers to."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch

from partita.errors import ArgumentTypeError

__all__ = [
    "PieceLike",
    "PipeLike",
    "Root",
    "SplitLike",
    "Subject",
    "holds_state",
    "is_empty",
    "is_pipe",
    "state_globals",
    "subject_of",
]


Root: TypeAlias = torch.nn.Module | torch.Tensor | torch.Generator


class PieceLike(Protocol):
    """The attributes of a piece that `verify` uses."""

    @property
    def name(self) -> str:
        """The name of its submodule in the stitched module."""

    @property
    def module(self) -> torch.fx.GraphModule:
        """The graph of the piece; its nodes keep the names that they had in the whole."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes of the whole that run in this piece."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The nodes of the whole whose values it takes."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The nodes of the whole whose values it returns; one alone is the bare value."""


@runtime_checkable
class SplitLike(Protocol):
    """The attributes of a split that `verify` uses."""

    @property
    def module(self) -> torch.fx.GraphModule:
        """The stitched module, which calls the pieces."""

    @property
    def pieces(self) -> tuple[PieceLike, ...]:
        """The pieces, in the order in which they run."""


class PipeLike(Protocol):
    """The attributes of a pipe that `verify` uses."""

    @property
    def whole(self) -> torch.fx.GraphModule:
        """The graph that was cut."""

    @property
    def split_gm(self) -> torch.fx.GraphModule:
        """The stitched module, which calls the pieces, and is called when the pipe is."""

    @property
    def pieces(self) -> tuple[PieceLike, ...]:
        """The pieces, in the order in which they run."""

    @property
    def draws_other_numbers(self) -> bool:
        """Whether its pieces, as they are compiled, draw other random numbers than the graph that was cut."""


def is_pipe(value: object) -> TypeGuard[PipeLike]:
    """Return whether it has the attributes of a pipe. (From Python 3.12 on ``isinstance`` sees none that are
    children of a module.)
    """
    return all(hasattr(value, name) for name in ("whole", "split_gm", "pieces", "draws_other_numbers"))


@dataclass(frozen=True)
class Subject:
    """A callable and the state that it refers to.

    Attributes:
        call: what is called with the arguments.
        roots: the modules, tensors outside of modules, and random generators that make up the state, each
            with the prefix of its names.
    """

    call: Callable[..., Any]
    roots: tuple[tuple[str, Root], ...]


def subject_of(value: Any) -> Subject:
    """Find the state of a module, a split or any other callable.

    The state of a function is the modules, tensors and random generators that it closes over, has as defaults
    or reads from its file's globals, directly or through lists, dicts, partials, methods, objects and
    functions of the same file.

    Raises:
        ArgumentTypeError: ``value`` can't be called.
    """
    if not isinstance(value, torch.nn.Module) and isinstance(value, SplitLike):
        value = value.module
    if not callable(value):
        raise ArgumentTypeError(f"can't run a {type(value).__name__}: give a module, a split or a function")
    state = _state_in(value)
    modules = [name for name, root in state if isinstance(root, torch.nn.Module)]
    # The names of a single module need no prefix, whatever the function calls it.
    only_module = modules[0] if len(modules) == 1 else None
    roots = tuple(("" if name == only_module else name, root) for name, root in state)
    return Subject(value, roots)


def holds_state(value: Any) -> bool:
    """Return whether a module, tensor or random generator can be reached from ``value``."""
    return bool(_state_in(value))


def state_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals that a function, or one defined inside it, reads and that may lead to state."""
    codes, names = [function.__code__], list[str]()
    while codes:
        code = codes.pop()
        names.extend(name for name in code.co_names if name in function.__globals__)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    wanted = (Root, functools.partial, types.MethodType, list, tuple, dict)
    by_name = {}
    for name in names:
        value = function.__globals__[name]
        # Functions of other files are not followed: that would lead through whole libraries.
        local = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
        if (local or isinstance(value, wanted)) and not name.startswith("__"):
            by_name[name] = value
    return by_name


def is_empty(cell: types.CellType) -> bool:
    """Return whether a closure's cell has no content yet."""
    try:
        cell.cell_contents  # noqa: B018 (reading is the only way to ask)
    except ValueError:
        return True
    return False


def _state_in(value: Any) -> list[tuple[str, Root]]:
    """All state that can be reached, each item once, with its path; modules are not searched."""
    state: list[tuple[str, Root]] = []
    seen: set[int] = set()
    waiting = [("", value)]
    while waiting:
        name, item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Root):
            state.append((name, item))
            continue
        parts = [(".".join(filter(None, (name, part))), inner) for part, inner in _parts(item)]
        waiting.extend(reversed(parts))
    return state


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
