"""An independent copy of a callable, its state and its arguments.

A copy shares nothing that a run could change. Modules and tensors are deep-copied with one memo, so that one
object stays one object (tied parameters, an argument that is a parameter, views of one storage). Functions
are rebuilt over copies of the modules and tensors that they refer to.
"""

from __future__ import annotations

import copy
import functools
import io
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.modules.closure_copy import UNCOPIED, Memo, with_closures
from partita._torch.modules.compiled import compile_in_place_like, compiled_like, inside_compiled
from partita.errors import ArgumentTypeError
from partita.verification.observing.subject import (
    Subject,
    holds_state,
    is_empty,
    state_globals,
    subject_of,
)
from partita.verification.tree import LEAF_TYPES, parts, tensors

__all__ = ["Copies", "copy_for_run", "copy_module"]

_CONTAINERS = (list, tuple, dict)
_NUMBERS_AND_TEXT = (bool, int, float, complex, str)
_SHARED = (*UNCOPIED, torch.jit.ScriptFunction, io.IOBase)
"""What both sides of a comparison can have."""
_COPYING = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


@dataclass(frozen=True)
class Copies:
    """What one side of a comparison runs with.

    Attributes:
        subject: the callable and its state.
        args: positional arguments.
        kwargs: keyword arguments.
        leaves: the path of each argument that requires grad, and the leaf that it is or is computed from,
            where its gradient arrives.
        tensors: all that were copied, by identity.
    """

    subject: Subject
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[tuple[str, torch.Tensor], ...]
    tensors: dict[int, torch.Tensor]


def copy_module(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module. ``copy.deepcopy`` refuses one with a computed tensor among its attributes, which is what
    ``torch.nn.utils.weight_norm`` leaves.

    Raises:
        ArgumentTypeError: something in it can't be copied.
    """
    copied = copy_for_run(subject_of(module), (), {}).subject.call
    assert isinstance(copied, torch.nn.Module)
    return copied


def copy_for_run(subject: Subject, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Copies:
    """Copy everything that a run could change.

    Raises:
        ArgumentTypeError: something can't be copied.
    """
    # Normal tensors stay normal where the caller is in inference mode. What torch warns of while it is copied
    # (deprecated pytree specs) is not about the caller's code.
    with (
        torch.inference_mode(False),
        warnings.catch_warnings(),
        with_closures(others_shared=True) as memo,
    ):
        warnings.simplefilter("ignore")
        copier = _Copier(memo)
        try:
            new_args, new_kwargs = copier.copy(args), copier.copy(dict(kwargs))
            roots = tuple((name, copier.copy(root)) for name, root in subject.roots)
            call = copier.copy(subject.call)
        except Exception as error:
            name = getattr(subject.call, "__qualname__", type(subject.call).__name__)
            raise ArgumentTypeError(
                f"can't copy {name} or its arguments ({type(error).__name__}: {error}); verify runs copies, "
                "so give modules, functions over modules, and arguments that copy.deepcopy takes"
            ) from error
    originals = [*tensors(args, "args"), *tensors(dict(kwargs), "kwargs")]
    copied = [*tensors(new_args, "args"), *tensors(new_kwargs, "kwargs")]
    leaves: dict[int, tuple[str, torch.Tensor]] = {}
    for (path, original), (_, new) in zip(originals, copied, strict=True):
        if new.requires_grad:
            leaf = copier.sources.get(id(original), new)
            leaves.setdefault(id(leaf), (path, leaf))
    by_identity = {id(value): value for value in memo.values() if isinstance(value, torch.Tensor)}
    return Copies(Subject(call, roots), new_args, new_kwargs, tuple(leaves.values()), by_identity)


def _copied_by_class(kind: type[torch.nn.Module]) -> bool:
    """Whether a class of modules overrides how it is copied or pickled."""
    return any(getattr(kind, name, None) is not getattr(torch.nn.Module, name, None) for name in _COPYING)


class _Copier:
    """Copies everything of one side with one memo.

    Args:
        memo: in which nothing is yet.

    Attributes:
        sources: from the id of an original with a history to the leaf that its copy is computed from.
    """

    def __init__(self, memo: Memo) -> None:
        self.sources: dict[int, torch.Tensor] = {}
        self._memo = memo
        self._searched: set[int] = set()
        self._kept: list[Any] = []  # both have ids as keys: these objects must not be freed
        self._globals: dict[int, dict[str, Any]] = {}

    def copy(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, types.FunctionType):
            return self._copy_function(value)
        if type(value) in _CONTAINERS:
            return self._copy_container(value, self.copy)
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            return self._remember(value, self._copy_computed(value))
        if isinstance(value, types.MethodType):
            return self._remember(value, types.MethodType(value.__func__, self.copy(value.__self__)))
        if isinstance(value, functools.partial):
            func, args = self.copy(value.func), self.copy(value.args)
            return self._remember(value, functools.partial(func, *args, **self.copy(value.keywords)))
        if type(value) is torch.nn.Parameter:
            return self._copy_parameter(value)
        if isinstance(value, torch.nn.Module):
            return self._copy_module(value)
        self._copy_tensors_in(value)
        return copy.deepcopy(value, self._memo)

    def _copy_module(self, value: torch.nn.Module) -> Any:
        inner = inside_compiled(value)
        if inner is not None:
            compiled = self._remember(value, compiled_like(value, self.copy(inner)))
            self._complete(value)
            return compiled
        modules = list(value.modules())
        for module in modules:
            self._copy_tensors_in(vars(module))
            if inside_compiled(module) is not None:
                self.copy(module)
        copied = copy.deepcopy(value, self._memo)
        for module in modules:
            if id(module) not in self._memo:
                continue  # its owner makes another one when it is copied
            compile_in_place_like(module, self._memo[id(module)])
            if _copied_by_class(type(module)) and inside_compiled(module) is None:
                self._complete(module)
        return copied

    def _copy_tensors_in(self, value: Any) -> None:
        """Copy tensors that deepcopy refuses, or copies in part, so that it finds them in its memo; likewise
        what it refuses and is shared.
        """
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if type(item) in LEAF_TYPES:
                continue
            if isinstance(item, _SHARED):
                self._remember(item, item)
            elif isinstance(item, torch.Tensor):
                if not item.is_leaf or type(item) is torch.nn.Parameter:
                    self.copy(item)
            elif id(item) not in self._searched and (inside := parts(item)):
                self._searched.add(id(item))
                self._kept.append(item)
                waiting += reversed(list(inside))

    def _complete(self, module: torch.nn.Module) -> None:
        """Add to the copy of a module what its class left out or reset when it was copied.

        That may be hooks, attributes that a graph does not use, or the training flag.
        """
        copy_of: torch.nn.Module = self._memo[id(module)]
        copied = vars(copy_of)
        for name, value in vars(module).items():
            if name not in copied:
                copied[name] = copy.deepcopy(value, self._memo)
            elif isinstance(value, dict):
                for key in [key for key in value if key not in copied[name]]:
                    copied[name][key] = copy.deepcopy(value[key], self._memo)
            elif isinstance(value, _NUMBERS_AND_TEXT):
                copied[name] = value

    def _remember(self, value: Any, copied: Any) -> Any:
        self._memo[id(value)] = copied
        self._kept.append(value)
        return copied

    def _copy_container(self, value: Any, copy_item: Callable[[Any], Any]) -> Any:
        if isinstance(value, tuple):
            return self._remember(value, tuple(copy_item(item) for item in value))
        copied = self._remember(value, type(value)())  # before its items: they may lead back to it
        if isinstance(value, dict):
            copied.update((key, copy_item(item)) for key, item in value.items())
        else:
            copied.extend(copy_item(item) for item in value)
        return copied

    def _copy_parameter(self, value: torch.nn.Parameter) -> Any:
        """Copy with the gradient, and views of one storage as such; deepcopy does neither for parameters."""
        data = copy.deepcopy(value.detach(), self._memo)
        copied = torch.nn.Parameter(data, requires_grad=value.requires_grad)
        vars(copied).update(vars(value))
        copied.grad = copy.deepcopy(value.grad, self._memo)
        return self._remember(value, copied)

    def _copy_computed(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor with a history, with a history: a model may then still write to it in place.

        The copy is on the copied storage, so that aliases stay aliases, and is computed from a new leaf.
        """
        copied: torch.Tensor = copy.deepcopy(value.detach(), self._memo)
        with torch.enable_grad():
            leaf = value.detach().clone().requires_grad_()
            copied.copy_(leaf)
        self.sources[id(value)] = leaf
        return copied

    def _copy_function(self, function: types.FunctionType) -> Any:
        if not holds_state(function):
            return function
        home = str(function.__globals__.get("__name__", ""))
        if home.startswith("torch._dynamo"):
            raise ArgumentTypeError(
                f"{function.__qualname__} is a compiled function over modules or tensors; "
                "compile the module instead"
            )
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        new_globals = self._globals.setdefault(id(function.__globals__), dict(function.__globals__))
        copied = types.FunctionType(function.__code__, new_globals, function.__name__, None, cells or None)
        self._remember(function, copied)  # before its cells: it may be called by itself
        copied.__defaults__ = self._copy_state(function.__defaults__)
        copied.__kwdefaults__ = self._copy_state(function.__kwdefaults__)
        copied.__qualname__ = function.__qualname__
        copied.__dict__.update(function.__dict__)
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            if not is_empty(old):
                new.cell_contents = self._copy_state(old.cell_contents)
        for name, value in state_globals(function).items():
            new_globals[name] = self._copy_state(value)
        return copied

    def _copy_state(self, value: Any) -> Any:
        """Copy what refers to modules or tensors, and lists, tuples and dicts; share everything else."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if type(value) in _CONTAINERS:
            return self._copy_container(value, self._copy_state)
        return self.copy(value) if holds_state(value) else value
