"""A ``torch.autograd.Function`` in a captured graph: one node that calls it, so that its own backward pass is
kept.

Left to itself export goes through ``apply`` into ``forward``, records the operators that it finds there, and
autograd differentiates those: gradient reversal comes out with the wrong sign, a straight-through estimator
gives 0. So while a model is traced, ``apply`` itself is recorded::

    model      Reverse.apply(h, 0.5)               graph    reverse = Reverse(h)
                                                            (a `FunctionCall`, which holds the 0.5)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import function
from torch.autograd.function import Function, _SingleLevelFunction
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.node import has_side_effect
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _pytree as pytree

from partita._torch.containers.replaced import replaced
from partita._torch.export.open_sizes import is_symbolic
from partita._torch.modules.calls import function_kinds
from partita._torch.operators.draws import before_draws
from partita._torch.tensors.storage import is_same_view, storage_key
from partita.errors import CaptureError

__all__ = ["BackwardLost", "FunctionCall", "call_functions_directly", "functions_kept"]

_TRACED_THROUGH = ("torch._", "torch.utils.checkpoint", "torch.func")
"""Functions of these modules are part of how torch works; what they compute is recorded as ever."""

_LOST = (
    "strict mode traces into torch.autograd.Function and loses its backward pass: take what only strict mode "
    "can trace out of forward"
)
_HOOK = "a module's backward hook would be lost: its code runs on tensors of the trace alone"
_TRANSFORMED = (
    "{name}.apply runs within a transform of torch.func (vmap, grad, jacrev), in which a graph loses its "
    "backward pass: call it outside of the transform"
)
_APPLY = torch._C._FunctionBase.__dict__["apply"]
_HOLDER: Any = Function if vars(Function)["apply"] is _APPLY else _SingleLevelFunction
"""Its ``apply`` runs for every function; since torch 2.14 no Python of torch's stands before that."""


class BackwardLost(CaptureError):
    """A backward pass that no way of tracing keeps."""


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor among the arguments of a call: the one with this number."""

    number: int


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """Calls ``function.apply`` with tensors, between arguments that are none. The target of a graph's node.

    Attributes:
        function: the user's class.
        args: its arguments in order; a `Hole` for each tensor.
        writes: numbers of the tensors that ``forward`` writes to.
        aliases: numbers of the tensors whose memory its results may share.
        random: whether ``forward`` draws random numbers.
    """

    function: type[Function]
    args: tuple[Any, ...]
    writes: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    random: bool = False

    def __post_init__(self) -> None:
        # fx names a function in its code after these; what is of torch's modules it would look up there
        object.__setattr__(self, "__name__", self.function.__name__)
        object.__setattr__(self, "__module__", __name__)

    def __call__(self, *tensors: Any) -> Any:
        """Return what the function returns; autograd runs its backward."""
        args = [tensors[value.number] if isinstance(value, Hole) else value for value in self.args]
        return self.function.apply(*args)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, FunctionCall)
            and self._facts() == other._facts()
            and all(map(_same, self.args, other.args))
        )

    def __hash__(self) -> int:
        return hash(self._facts())

    def _facts(self) -> tuple[Any, ...]:
        return self.function, self.writes, self.aliases, self.random, len(self.args)


def _same(left: Any, right: Any) -> bool:
    """Whether two constants are equal; arrays, which have no one answer, only where they are one object."""
    return left is right or (
        type(left) is type(right) and not hasattr(left, "__array__") and bool(left == right)
    )


class _Recorded(HigherOrderOperator):
    """Stands in a graph for a call until the trace has ended: exported programs hold operators only."""

    def __init__(self) -> None:
        super().__init__("partita_autograd_function")

    def __call__(self, number: int, *tensors: Any) -> Any:
        return super().__call__(number, *tensors)


_recorded = _Recorded()
has_side_effect(_recorded)
_calls: list[FunctionCall] = []
"""The recorded calls of the trace that is under way."""


@_recorded.py_impl(ProxyTorchDispatchMode)
def _(mode: ProxyTorchDispatchMode, number: int, *tensors: Any) -> Any:
    tracer: Any = mode.tracer
    proxies = pytree.tree_map(tracer.unwrap_proxy, tensors)
    call = _calls[number]
    with disable_proxy_modes_tracing():
        result, _calls[number] = _observed(call, tensors)
    proxy = tracer.create_proxy(
        "call_function", _recorded, (number, *proxies), {}, name=call.function.__name__
    )
    return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def _observed(call: FunctionCall, tensors: Sequence[torch.Tensor]) -> tuple[Any, FunctionCall]:
    """Return a call's result, and the call with the writes, aliases and draws that were observed."""
    versions = [tensor._version for tensor in tensors]
    draws: list[str] = []
    with before_draws(draws.append):
        result = call(*tensors)
    leaves = [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]
    keys = {storage_key(value) for value in leaves}
    writes = tuple(number for number, tensor in enumerate(tensors) if tensor._version != versions[number])
    aliases = tuple(number for number, tensor in enumerate(tensors) if storage_key(tensor) in keys)
    return result, FunctionCall(call.function, call.args, writes, aliases, bool(draws))


@contextmanager
def functions_kept(*, strict: bool = False) -> Iterator[None]:
    """While ``torch.export`` traces, record calls of ``torch.autograd.Function``s (strict mode: refuse them).

    The exported graph still needs `call_functions_directly`, within the same block.
    """
    outer = list(_calls)
    _calls.clear()
    with ExitStack() as stack:
        stack.callback(_calls.__setitem__, slice(None), outer)
        stack.enter_context(replaced(_HOLDER, "apply", classmethod(_apply)))
        stack.enter_context(replaced(function, "custom_function_call", _in_transform))
        if _HOLDER is Function and not strict:
            # An ``apply`` that was looked up before (``reverse = Reverse.apply``) is none of Python's, and
            # comes by here only when it calls ``forward``.
            for kind in function_kinds():
                if not _is_traced_through(kind):
                    stack.enter_context(replaced(kind, "forward", staticmethod(_forward(kind))))
        yield


def _apply(cls: type[Function], *args: Any) -> Any:
    """Stands in for `Function.apply`: records the call where it is traced, and makes it elsewhere."""
    traced = any(map(_is_traced, args))
    if traced and cls.__qualname__.endswith("ApplyTemplate"):
        raise CaptureError(_LOST)
    if traced and cls is BackwardHookFunction:
        raise CaptureError(_HOOK)
    if not traced or _is_traced_through(cls):
        return _APPLY.__get__(None, cls)(*args)
    return _record(cls, args)[0]


def _in_transform(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Stands in for what a call within a transform of ``torch.func`` goes to."""
    if get_proxy_mode() is not None and not _is_traced_through(cls):
        raise BackwardLost(_TRANSFORMED.format(name=cls.__name__))
    return custom_function_call(cls, *args, **kwargs)


def _forward(kind: type[Function]) -> Callable[..., Any]:
    """What stands in for a function's ``forward``, with the same effect."""
    own = kind.forward
    has_context = kind.setup_context is _SingleLevelFunction.setup_context

    def forward(*args: Any) -> Any:
        of_apply = args[has_context:]
        if not any(map(_is_traced, of_apply)):
            return own(*args)
        result, written = _record(kind, of_apply)
        if has_context and written:
            args[0].mark_dirty(*written)
            return pytree.tree_map(lambda value: _itself(value, written), result)
        return result

    return forward


def _itself(value: Any, written: Sequence[torch.Tensor]) -> Any:
    """What was written to and is returned has to be that tensor, and not one with the same memory."""
    if not isinstance(value, torch.Tensor):
        return value
    return next((tensor for tensor in written if is_same_view(tensor, value)), value)


def _is_traced_through(kind: type[Function]) -> bool:
    return f"{kind.__module__}.".startswith(_TRACED_THROUGH)


def _record(cls: type[Function], args: Sequence[Any]) -> tuple[Any, list[torch.Tensor]]:
    """Record a call; return its result, and the tensors that it has written to and returns."""
    _check_arguments(cls, args)
    tensors: list[torch.Tensor] = []
    pattern: list[Any] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            pattern.append(Hole(len(tensors)))
            tensors.append(value)
        else:
            pattern.append(value)
    number = len(_calls)
    _calls.append(FunctionCall(cls, tuple(pattern)))
    result = _recorded(number, *tensors)
    call = _calls[number]
    return result, [tensors[place] for place in call.writes if place in call.aliases]


def _is_traced(value: Any) -> bool:
    return isinstance(value, FakeTensor) and get_proxy_mode() is not None


def _check_arguments(cls: type[Function], args: Sequence[Any]) -> None:
    """Refuse arguments that a graph can't hold as constants."""
    for value in args:
        if isinstance(value, torch.Tensor):
            continue
        leaves = [*pytree.tree_leaves(value), value]
        if any(isinstance(leaf, (torch.Tensor, torch.nn.Module)) for leaf in leaves):
            raise CaptureError(
                f"{cls.__name__}.apply is given a {type(value).__name__} that holds tensors, which a graph "
                "can't follow: give each tensor as an argument of its own"
            )
        if any(is_symbolic(leaf) for leaf in leaves):
            raise CaptureError(
                f"{cls.__name__}.apply is given a size of the batch, which a graph would hold as a constant: "
                "let it read the size from a tensor in forward"
            )


def call_functions_directly(gm: GraphModule) -> None:
    """Let the nodes of a graph, in place, call the functions themselves."""
    for node in gm.graph.find_nodes(op="call_function", target=_recorded):
        number, *tensors = node.args
        node.target = _calls[number]
        node.args = tuple(tensors)
