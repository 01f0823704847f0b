"""Sizes that ``torch.export`` left open, read out of an exported graph as text.

Inside of torch they are ``SymInt`` objects over sympy expressions, tied to the shape environment of one
trace. What leaves this file is Python source over names that say where a size is found: nothing that must be
traced, and all of it can be pickled and compared.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx.experimental._config as fx_config
from torch._guards import SLoc
from torch.export import Dim, ShapesCollection
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.utils._sympy.printers import PythonPrinter

from partita._torch.containers.replaced import replaced
from partita._torch.export.users_code import asking_line, is_users

__all__ = [
    "SIZE_OF",
    "OpenSizes",
    "batch_is_open",
    "constant_size",
    "drop_size_asserts",
    "fixed_as_int",
    "forget_sizes",
    "is_symbolic",
    "only_checked",
    "open_batch",
    "open_sizes",
    "size_at",
]

SIZE_OF: Any = torch.ops.aten.sym_size.int
"""The operator that reads one size of a tensor in an exported graph."""

_ASSERT: Any = torch.ops.aten._assert_scalar.default


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """What an exported graph says about sizes.

    Attributes:
        symbols: of each open size its name, and the input and dimension where it is found.
        shapes: the dimensions of every tensor that has an open one, by node: numbers, or expressions over the
            names.
        numbers: the expression of every node whose value is a number that depends on them.
        conditions: expressions that must hold, each with the line of the model (or of torch) that asked for
            it.
        closed: the line that fixed a size which was asked to stay open; empty where none was.
    """

    symbols: tuple[tuple[str, str, int], ...]
    shapes: Mapping[str, tuple[int | str, ...]]
    numbers: Mapping[str, str]
    conditions: tuple[tuple[str, str], ...]
    closed: str


_ARITHMETIC = re.compile(r"[\w\s+*()-]|//")
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def constant_size(text: str) -> int | None:
    """Return the value of an expression over sizes that does not depend on them; None where it does.

    >>> constant_size("(48*batch) // batch"), constant_size("48*batch")
    (48, None)
    """
    if _ARITHMETIC.sub("", text):
        return None
    names = {name: sympy.Symbol(name, integer=True, positive=True) for name in _NAME.findall(text)}
    value = sympy.sympify(text, locals=names)
    return int(value) if value.is_Integer else None


def open_batch(tensors: Sequence[torch.Tensor]) -> ShapesCollection:
    """Return ``dynamic_shapes`` with which ``torch.export`` leaves dim 0 of these tensors open, if it can."""
    shapes = ShapesCollection()
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        shapes[tensor] = {0: Dim.AUTO}
    return shapes


class _AsIntLoc(SLoc):
    """Where Python asked for an open size as an integer."""


_INT_METHODS = {
    torch.SymInt.__int__.__code__,
    torch.SymInt.__index__.__code__,  # of what ``len(x)`` returns
    torch.SymFloat.__int__.__code__,
}


def _asks_for_int() -> bool:
    """Whether ``int()`` or ``len()`` is what torch is answering at the moment."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code in _INT_METHODS:
            return True
        frame = frame.f_back
    return False


def fixed_as_int(gm: GraphModule) -> str:
    """Return the line of the model that called ``int()`` with an open size or a fraction of one
    (``int(windows.shape[0] / 4)``), or ``len()`` with a tensor, in an exported graph; empty where none did.
    Python gets an integer there, so the size is fixed; only a trace that reads the bytecode keeps it open.
    """
    environment = _environment_of(node for node in gm.graph.nodes if node.op == "placeholder")
    guards = () if environment is None else environment.guards
    return next((_place(guard.sloc) for guard in guards if isinstance(guard.sloc, _AsIntLoc)), "")


@contextlib.contextmanager
def batch_is_open() -> Iterator[None]:
    """Trace without the assumption that an open size is neither 0 nor 1, and record which line closes a size.

    Where a branch of the model asks for the size, the answer becomes a condition; torch's own branches take
    the general way. So the graph holds for a batch of 1 too, or has the condition that says it does not.
    """
    original = ShapeEnv._get_sloc
    environments: dict[int, ShapeEnv] = {}

    def located(self: ShapeEnv, framework_loc: str | None = None) -> SLoc:
        environments[id(self)] = self
        location = original(self, framework_loc)
        kind = _AsIntLoc if _asks_for_int() else SLoc
        return kind(location.framework_loc, location.maybe_user_loc or asking_line())

    oblivious = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    try:
        with replaced(ShapeEnv, "_get_sloc", located), oblivious:
            yield
    finally:
        for environment in environments.values():
            _untie(environment)


def _untie(environment: ShapeEnv) -> None:
    """Release the inputs of a trace that is over. Their sizes refer to the environment from within C++, where
    Python's garbage collector does not look, so that neither would ever be freed.
    """
    environment.tracked_fakes = None
    environment.fake_tensor_cache.clear()


def forget_sizes() -> None:
    """Empty torch's caches of what it has worked out about sizes: each entry keeps all of a trace alive."""
    for method in vars(ShapeEnv).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()


def is_symbolic(value: object) -> bool:
    """Whether a number is symbolic."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def size_at(size: int | torch.SymInt, change: Callable[[int], int]) -> int:
    """Return what a size would be where each open size of the example were changed by ``change``."""
    if isinstance(size, int):
        return size
    node = size.node
    environment = node.shape_env
    hints = getattr(environment, "backed_var_to_val", None) or environment.var_to_val  # torch 2.11's name
    return int(node.expr.subs({symbol: change(int(hints[symbol])) for symbol in node.expr.free_symbols}))


def drop_size_asserts(gm: GraphModule) -> None:
    """Erase from a graph, in place, the checks of sizes (`OpenSizes.conditions` say the same), the nodes that
    only these use, and sizes that nothing uses.
    """
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_function":
            continue
        condition = node.args[0] if node.target is _ASSERT else None
        checked = condition.meta.get("val") if isinstance(condition, Node) else condition
        is_condition = node.target is _ASSERT and (not is_symbolic(checked) or not _unbacked(checked))
        if is_condition or (not node.users and is_symbolic(node.meta.get("val"))):
            gm.graph.erase_node(node)


def only_checked(gm: GraphModule) -> set[Node]:
    """Return the assertions about numbers, and the nodes that nothing but these assertions uses."""
    checked: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node.target is _ASSERT or (node.users and all(user in checked for user in node.users)):
            checked.add(node)
    return checked


def open_sizes(gm: GraphModule) -> OpenSizes | None:
    """Return what an exported graph says about sizes; None where one depends on data, not on shapes alone."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    environment = _environment_of(inputs)
    names: dict[Any, sympy.Symbol] = {}
    symbols: list[tuple[str, str, int]] = []
    for node, dim, size in _input_sizes(inputs):
        expression = size.node.expr
        if expression.is_Symbol and expression not in names:
            name = f"{node.name}_{dim}"
            names[expression] = sympy.Symbol(name, integer=True, positive=True)
            symbols.append((name, node.name, dim))
    if len(symbols) == 1 and symbols[0][2] == 0:
        symbols = [("batch", *symbols[0][1:])]
        names = dict.fromkeys(names, sympy.Symbol("batch", integer=True, positive=True))
    shapes: dict[str, tuple[int | str, ...]] = {}
    numbers: dict[str, str] = {}
    checked = only_checked(gm)
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node in checked and is_symbolic(value) and _unbacked(value):
            continue  # assert x.max().item() < 9
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if not any(is_symbolic(size) for size in sizes):
            continue
        texts = tuple(_text(size, names) if is_symbolic(size) else size for size in sizes)
        if None in texts:
            return None
        if isinstance(value, torch.Tensor):
            shapes[node.name] = texts  # type: ignore[assignment]
        else:
            numbers[node.name] = str(texts[0])
    conditions, closed = ((), "") if environment is None else _demands(environment, names)
    if conditions is None:
        return None
    return OpenSizes(tuple(symbols), shapes, numbers, conditions, closed)


def _input_sizes(inputs: Sequence[Node]) -> Iterator[tuple[Node, int, Any]]:
    for node in inputs:
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if is_symbolic(size):
                yield node, dim, size


def _environment_of(inputs: Iterable[Node]) -> ShapeEnv | None:
    for node in inputs:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return cast(ShapeEnv, mode.shape_env)
    return None


def _demands(
    environment: ShapeEnv, names: Mapping[Any, sympy.Symbol]
) -> tuple[tuple[tuple[str, str], ...] | None, str]:
    """Return the conditions under which the trace holds (None where one can't be expressed), and the line
    that closed a size.
    """
    wanted: dict[str, str] = {}
    closed = ""
    for guard in environment.guards:
        expression = environment.replace(guard.expr)
        if not expression.free_symbols:
            left, right = (*guard.expr.args, None, None)[:2]
            if isinstance(guard.expr, sympy.Eq) and (left.is_number or right.is_number):
                closed = closed or _place(guard.sloc)
            continue
        text = _printed(expression, names)
        if text is None:
            return None, closed
        wanted.setdefault(text, _place(guard.sloc))
    for symbol, bounds in environment.var_to_range.items():
        if symbol not in names:
            continue
        place = environment.var_to_range_sloc.get(symbol)
        for bound, relation, where in (
            (bounds.lower, ">=", getattr(place, "lower", None)),
            (bounds.upper, "<=", getattr(place, "upper", None)),
        ):
            if bound.is_Integer and (relation == "<=" or bound > 1):
                wanted.setdefault(f"{names[symbol]} {relation} {int(bound)}", _place(where))
    return tuple(wanted.items()), closed


def _place(where: SLoc | None) -> str:
    if where is None:
        return ""
    return where.maybe_user_loc or str(where).strip("()")


def _unbacked(value: Any) -> bool:
    return bool(free_unbacked_symbols(value))


def _text(value: Any, names: Mapping[Any, sympy.Symbol]) -> str | int | None:
    expression = value.node.expr
    return int(expression) if expression.is_Integer else _printed(expression, names)


def _printed(expression: Any, names: Mapping[Any, sympy.Symbol]) -> str | None:
    if not expression.free_symbols <= names.keys():
        return None
    return str(PythonPrinter().doprint(expression.xreplace(dict(names))))
