"""Whether a traced function makes the same calls of torch when it runs again, without tracing it twice.

In the first run, which is traced, every call of torch is logged with its result. In the second nothing is
computed: a call that is like the logged one gets the logged result, and the first that is not ends the run::

    first run    relu(x) -> h    linear(h, W) -> y    dropout(y, 0.1, True) -> z
    second run   relu(x) = h     linear(h, W) = y     dropout(y, 0.1, False)       another: not the same

Sizes that are open are compared as expressions, and a branch on one that the first run did not take (`if not
self.training and len(x) > 4`) ends the second run as well. Whatever is not sure to be the same counts as
different: an operator that is called past torch's functions, an argument that can't be compared, an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import (
    _temp_remove_pre_dispatch_torch_function_mode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partita._torch.autograd.region_switches import AUTOCAST_DEVICES, OpenRegions
from partita._torch.containers.objects import open_objects
from partita._torch.containers.pytree import same_structure
from partita._torch.export.alike import COMPARABLE, alike
from partita._torch.export.users_code import asking_line
from partita.errors import LongCapture

__all__ = ["MANY_CALLS", "CallLog"]

MANY_CALLS = 20_000
"""A trace of so many calls takes a minute or more: somebody who waits for it is told once."""

_SET_GRAD: Any = torch._C._set_grad_enabled
_SIZES = frozenset({"aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset"})
_ASKING = ("evaluate_sym_node", "evaluate_expr", "guard_or_defer_runtime_assert")
"""What a shape environment is asked through."""


class _Differs(BaseException):
    """Ends the second run, past whatever the model catches."""


@dataclass(frozen=True)
class _Call:
    """One call of torch, or a question about a size that is open.

    Attributes:
        regions: those that it was made in.
        result: for an iterator all that it gave.
        iterates: whether it was one.
    """

    function: Any
    operands: Any
    regions: tuple[Any, ...] = ()
    result: Any = None
    iterates: bool = False


class CallLog:
    """The calls that a function which is being traced makes, between `begin` and `end`.

    Args:
        reachable: nested containers with all tensors that the function can reach before it calls anything.

    Attributes:
        complete: whether a second run can be compared with all of it.
    """

    def __init__(self, reachable: Any = ()) -> None:
        self.complete = True
        self.depth = 0
        """How many logged calls are under way, one within the other."""
        self._calls: list[_Call] = []
        self._count = 0
        self._marks: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self._sizes: ShapeEnv | None = None
        proxies = get_proxy_mode()
        self._graph = None if proxies is None else getattr(proxies.tracer, "graph", None)
        self._last: Node | None = None
        for leaf in pytree.tree_leaves(reachable):
            if isinstance(leaf, Tensor):
                self.kept(leaf)
        self._logging = ExitStack()
        self._ended: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Start to log calls."""
        self._last = self._newest()
        self._logging.enter_context(_questions_to(self._sizes, self._note_question))
        self._logging.enter_context(_Logging(self))

    def end(self, result: Any = None) -> None:
        """Stop, and keep what the function has returned."""
        self.stop()
        self.see_nodes()
        leaves, structure = self._flat(result)
        self._ended = leaves, structure, _regions()
        for tensor, names in self._marks.values():
            if any(not name.startswith("_") for name in vars(tensor).keys() - names):
                self.complete = False  # somebody has written on it, and may read that

    def stop(self) -> None:
        """Stop, where the function has no result."""
        self._logging.close()

    def repeats(self, function: Callable[[], Any]) -> bool:
        """Whether ``function`` makes the logged calls, no others, and returns the same. Nothing is traced."""
        if not self.complete:
            return False
        replay = _Replaying(self._calls)
        try:
            with (
                _calls_of_modules_kept(),
                _settings_kept(),
                _nothing_new_of(self._sizes, replay.differ),
                _questions_to(self._sizes, replay.question),
                disable_proxy_modes_tracing(),
                _temp_remove_pre_dispatch_torch_function_mode(),
                _Unlogged(replay.differ),
                replay,
            ):
                ended = *self._flat(function()), _regions()
        except (_Differs, Exception):  # an error of the model's comes again where that mode is traced
            return False
        return replay.ended and self.complete and _same_ending(self._ended, ended)

    def note(self, function: Any, operands: Any, regions: tuple[Any, ...], result: Any) -> Any:
        """Log a call, whose operands are as `kept` returns them, and return its result."""
        iterates = isinstance(result, Iterator)  # over the rows of a tensor
        whole = tuple(result) if iterates else result
        self._calls.append(_Call(function, operands, regions, self.kept(whole), iterates))
        self._count += 1
        if self._count == MANY_CALLS:
            _tell_of_many()
        return iter(whole) if iterates else whole

    def kept(self, value: Any) -> Any:
        """Return a value with lists and dicts of its own, which stay as they are now."""
        kind = type(value)
        if isinstance(value, Tensor):
            if isinstance(value, FakeTensor):
                self._sizes = value.fake_mode.shape_env
            self._marks.setdefault(id(value), (value, frozenset(vars(value))))
        elif kind in (list, tuple):
            return kind(map(self.kept, value))
        elif kind is dict:
            return {key: self.kept(item) for key, item in value.items()}
        elif isinstance(value, tuple):
            self.complete = self.complete and not any(isinstance(item, (list, dict)) for item in value)
            for item in value:
                self.kept(item)
        elif not isinstance(value, COMPARABLE):
            self.complete = False
        return value

    def see_nodes(self) -> None:
        """Look at the nodes that have come into the graph since: an operator that was called past torch's
        functions can't be seen in a second run.
        """
        node = self._last
        newest = self._newest()
        while node is not None and node is not newest:
            node = node.next
            target = node.target
            is_size = isinstance(target, OpOverload) and target._schema.name in _SIZES
            if isinstance(target, (OpOverload, HigherOrderOperator)) and not is_size:
                self.complete = False
        self._last = newest

    def skip_nodes(self) -> None:
        """Leave out the nodes that a logged call has made."""
        self._last = self._newest()

    def _newest(self) -> Node | None:
        return None if self._graph is None else self._graph._root.prev

    def _note_question(self, name: str, text: str) -> None:
        if not self.depth:
            self._calls.append(_Call(name, text))

    def _flat(self, result: Any) -> tuple[list[Any], pytree.TreeSpec]:
        leaves, structure = pytree.tree_flatten(open_objects(result))
        return self.kept(leaves), structure


def _tell_of_many() -> None:
    line = asking_line()
    where = f", now at {line}" if line else ""
    warnings.warn(
        f"capture has recorded {MANY_CALLS:,} calls of torch and goes on{where}: a loop "
        "(over time steps, over experts) becomes a graph step by step. Give an example with fewer steps "
        '(partita plan: a smaller --sequence), or cut the model\'s own code, frontend="modules"',
        LongCapture,
        stacklevel=2,
    )


class _Logging(TorchFunctionMode):
    def __init__(self, log: CallLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # what it makes is called, and seen then
            return func(*args, **(kwargs or {}))
        return _logged(self._log, func, args, kwargs or {})


def _logged(log: CallLog, func: Any, args: Any, kwargs: Any) -> Any:
    if func is _SET_GRAD:
        return func(*args, **kwargs)
    log.see_nodes()
    operands, regions = log.kept((args, kwargs)), _regions()
    log.depth += 1
    try:
        result = func(*args, **kwargs)
    except Exception:
        log.complete = False  # the model may catch it and go on
        raise
    finally:
        log.depth -= 1
    result = log.note(func, operands, regions, result)
    log.skip_nodes()
    return result


class _Replaying(TorchFunctionMode):
    def __init__(self, calls: Sequence[_Call]) -> None:
        super().__init__()
        self._calls = calls
        self._position = 0
        self._differs = False

    @property
    def ended(self) -> bool:
        """Whether all logged calls were made, and no others."""
        return not self._differs and self._position == len(self._calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        return self._replayed(func, args, kwargs or {})

    def _replayed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _SET_GRAD:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        call = self._next()
        if call.function == func and call.regions == _regions() and alike(call.operands, (args, kwargs)):
            return iter(call.result) if call.iterates else _copied(call.result)
        return self.differ()

    def question(self, name: str, text: str) -> None:
        """Compare a question about an open size with the logged one."""
        call = self._next()
        if (call.function, call.operands) != (name, text):
            self.differ()

    def _next(self) -> _Call:
        if self._differs or self._position == len(self._calls):
            self.differ()
        self._position += 1
        return self._calls[self._position - 1]

    def differ(self) -> NoReturn:
        self._differs = True
        raise _Differs


class _Unlogged(TorchDispatchMode):
    """Ends the second run where it computes something past torch's functions."""

    def __init__(self, differ: Callable[[], NoReturn]) -> None:
        super().__init__()
        self._differ = differ

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._differ()


@contextmanager
def _nothing_new_of(sizes: ShapeEnv | None, differ: Callable[[], NoReturn]) -> Iterator[None]:
    """End the second run where it asks about an open size what the first run has not answered."""
    if sizes is None:
        yield
        return
    vars(sizes)["_check_frozen"] = lambda *_: differ()  # called before a condition is added
    try:
        yield
    finally:
        del vars(sizes)["_check_frozen"]


@contextmanager
def _questions_to(sizes: ShapeEnv | None, note: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``note`` with each question about an open size, but not with those asked to answer another."""
    if sizes is None:
        yield
        return
    answering = False

    def noted(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(about: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal answering
            if answering:
                return ask(about, *args, **kwargs)
            note(name, str(getattr(about, "expr", about)))
            answering = True
            try:
                return ask(about, *args, **kwargs)
            finally:
                answering = False

        return asked

    for name in _ASKING:
        vars(sizes)[name] = noted(name, getattr(sizes, name))
    try:
        yield
    finally:
        for name in _ASKING:
            del vars(sizes)[name]


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Put back what code that is ended in the middle has not put back itself."""
    dtype, regions = torch.get_default_dtype(), OpenRegions.now()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        regions.put_back()


@contextmanager
def _calls_of_modules_kept() -> Iterator[None]:
    """Put back the tracer's record of the modules that are being called: a call that an exception ends stays
    in it.
    """
    mode = get_proxy_mode()
    tracer: Any = None if mode is None else mode.tracer
    names = [name for name in ("module_stack", "num_calls") if hasattr(tracer, name)]
    before = {name: dict(getattr(tracer, name)) for name in names}
    try:
        yield
    finally:
        for name, content in before.items():
            table = getattr(tracer, name)
            table.clear()
            table.update(content)


def _regions() -> tuple[Any, ...]:
    """Return the grad, inference, dtype and autocast settings that a call is made under."""
    casts = tuple(
        (device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), casts


def _same_ending(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    (leaves, structure, regions), (others, other_structure, other_regions) = left, right
    same = same_structure(structure, other_structure)
    return same and regions == other_regions and alike(leaves, others)


def _copied(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value
