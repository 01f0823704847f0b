"""Deep copies in which functions go along.

``copy.deepcopy`` takes a function as it is. A module whose ``forward`` was replaced on the instance by a
function that calls the old one would so be copied into one that still runs the original::

    forward = module.forward                            copy.forward
    module.forward = lambda x: forward(x)        -->        its closure holds module.forward: the original's

Here a function with a closure is copied too, and its copy refers to the copies of the modules, tensors and
functions that the closure holds. What has no copy (a process group, a lock) is shared.
"""

from __future__ import annotations

import copy
import io
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["UNCOPIED", "Memo", "with_closures"]

Memo = dict[Any, Any]
"""What ``copy.deepcopy`` keeps of one copy: by the identity of the original, the copy."""

_WAITING = "partita: functions that wait for the copies of what they hold"
_SHARED = "partita: whether what does not belong to what is copied is shared"
_LOCK = threading.RLock()
_CACHED: Any = type(lru_cache(len))
UNCOPIED = (
    types.ModuleType,
    dist.ProcessGroup,
    type(threading.Lock()),
    type(threading.RLock()),
    io.TextIOWrapper,
)
"""What ``copy.deepcopy`` refuses and two copies can both have: it holds no tensors."""
_PRIMITIVES = (type(None), bool, int, float, complex, str, bytes, type)


@contextmanager
def with_closures(
    within: Memo | None = None, *, others_shared: bool = False, tensors_shared: bool = False
) -> Iterator[Memo]:
    """Give out a memo for ``copy.deepcopy(value, memo)`` with which functions are copied too. The copied
    functions are complete when the block ends.

    What a closure holds is copied where it is a module, a tensor, a function, a method of a module, or a
    container of such; and where it belongs to what was copied. Anything else (a mesh, a logger) is shared.

    Args:
        within: the memo of a larger copy that is being made, in which all that is copied is entered.
        others_shared: modules and tensors that only closures hold are shared, too, and so are functions that
            lead to no module and no tensor.
        tensors_shared: so are tensors, wherever they are, but for those that the memo has copies of.

    >>> layer = nn.Linear(2, 2)
    >>> layer.forward = (lambda forward: lambda x: forward(x))(layer.forward)
    >>> with with_closures() as memo:
    ...     twin = copy.deepcopy(layer, memo)
    >>> twin.forward.__closure__[0].cell_contents.__self__ is twin
    True
    """
    waiting: list[Callable[[], None]] = []
    # Not a copy of the larger memo: deepcopy lists what it keeps alive under its memo's own identity, which
    # another object may have as soon as that copy is gone.
    memo: Memo = {} if within is None else within
    larger = {key: memo[key] for key in (_WAITING, _SHARED) if key in memo}
    memo.update({_WAITING: waiting, _SHARED: others_shared})
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    ours: dict[type, Any] = {FunctionType: _copy_function, _CACHED: _copy_cached, weakref.ref: _copy_weak}
    ours |= dict.fromkeys(UNCOPIED, _share)
    if tensors_shared:
        ours |= dict.fromkeys((Tensor, nn.Parameter), _share_tensor)
    with _LOCK:
        before = {kind: dispatch.get(kind) for kind in ours}
        dispatch.update(ours)
        try:
            yield memo
            for fill in waiting:  # grows meanwhile
                fill()
        finally:
            for key in (_WAITING, _SHARED):
                memo.pop(key, None)
            memo.update(larger)
            for kind, copier in before.items():
                if copier is None:
                    del dispatch[kind]
                else:
                    dispatch[kind] = copier


def _copy_function(function: FunctionType, memo: Memo) -> FunctionType:
    """Stands in for what ``copy.deepcopy`` does with a function; copies with other memos are as ever."""
    waiting = memo.get(_WAITING)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    refers = function.__closure__ or "__wrapped__" in vars(function)
    if waiting is None or not (refers or any(not isinstance(value, _PRIMITIVES) for value in defaults)):
        return function
    if memo[_SHARED] and not _leads_to_module(function, set()):
        return function
    cells = tuple(_copy_cell(cell, memo, waiting) for cell in function.__closure__ or ())
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells or None
    )
    memo[id(function)] = twin

    def fill() -> None:
        twin.__defaults__ = _follow(function.__defaults__, memo)
        twin.__kwdefaults__ = _follow(function.__kwdefaults__, memo)
        twin.__qualname__, twin.__doc__ = function.__qualname__, function.__doc__
        twin.__module__, twin.__annotations__ = function.__module__, function.__annotations__
        vars(twin).update(_follow(vars(function), memo))

    waiting.append(fill)
    return twin


def _copy_cached(function: Any, memo: Memo) -> Any:
    """The same with a function of ``functools.lru_cache`` or ``cache``; the copy's cache is empty."""
    inside = function.__wrapped__
    if _WAITING not in memo:
        return function
    of_module = isinstance(inside, MethodType) and isinstance(inside.__self__, nn.Module)
    wrapped = copy.deepcopy(inside, memo) if of_module else _follow(inside, memo)
    return function if wrapped is inside else lru_cache(**function.cache_parameters())(wrapped)


def _copy_weak(reference: weakref.ref[Any], memo: Memo) -> weakref.ref[Any]:
    """The same with a weak reference to what is being copied, such as from a layer to its model."""
    twin = memo.get(id(reference()))
    return reference if twin is None or _WAITING not in memo else weakref.ref(twin)


def _share(value: Any, memo: Memo) -> Any:
    """The same with what has no copy."""
    return value if _WAITING in memo else value.__reduce_ex__(4)  # which raises


def _share_tensor(tensor: Tensor, memo: Memo) -> Tensor:
    return tensor if _WAITING in memo else tensor.__deepcopy__(memo)


def _leads_to_module(value: Any, seen: set[int]) -> bool:
    """Whether a module or a tensor can be reached."""
    if isinstance(value, (nn.Module, Tensor)):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]
        inside = [cell.cell_contents for cell in cells]
        inside += [value.__defaults__, value.__kwdefaults__, vars(value).get("__wrapped__")]
    elif isinstance(value, _CACHED):
        inside = (value.__wrapped__,)
    elif isinstance(value, weakref.ref):
        inside = (value(),)
    elif isinstance(value, MethodType):
        inside = (value.__self__,)
    elif type(value) is partial:
        inside = (value.func, value.args, value.keywords)
    elif type(value) in (tuple, list, set):
        inside = value
    elif type(value) is dict:
        inside = value.values()
    return any(_leads_to_module(item, seen) for item in inside)


def _copy_cell(cell: CellType, memo: Memo, waiting: list[Callable[[], None]]) -> CellType:
    """Return the copy of a cell, one for all functions that share the cell; it is filled later."""
    if id(cell) not in memo:
        twin = memo[id(cell)] = CellType()

        def fill() -> None:
            try:
                content = cell.cell_contents
            except ValueError:  # it has none yet
                return
            twin.cell_contents = _follow(content, memo)

        waiting.append(fill)
    return memo[id(cell)]


def _follow(value: Any, memo: Memo) -> Any:
    """What stands in place of ``value`` in a copied function."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, (nn.Module, Tensor)):
        return value if memo[_SHARED] else copy.deepcopy(value, memo)
    if isinstance(value, (FunctionType, _CACHED, weakref.ref)):
        return copy.deepcopy(value, memo)
    if isinstance(value, MethodType):
        owner = _follow(value.__self__, memo)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)
    if type(value) is partial:
        keywords = {name: _follow(item, memo) for name, item in value.keywords.items()}
        return partial(_follow(value.func, memo), *(_follow(item, memo) for item in value.args), **keywords)
    if type(value) is tuple:
        return tuple(_follow(item, memo) for item in value)
    if type(value) in (list, set):
        twin = memo[id(value)] = type(value)()
        items = [_follow(item, memo) for item in value]
        twin.extend(items) if isinstance(twin, list) else twin.update(items)
        return twin
    if type(value) is dict:
        table = memo[id(value)] = {}
        table.update({name: _follow(item, memo) for name, item in value.items()})
        return table
    return value
