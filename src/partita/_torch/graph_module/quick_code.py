"""Code for a graph's first run, shared by all graphs of equal structure.

torch generates Python source for each graph and compiles it. Most of that time goes into names and into the
compiler, so here the source is canonical: values, operators, constants and attribute names are numbered and
not spelled::

    graph                                      canonical source
    h = layers.3.norm(x)                       v0=self.q0.q1.q2(a0);a0=None
    y = torch.add(h, 1.0)                      v1=f1(v0,c1);v0=None
    return y                                   return v1

Graphs that differ in constants, operators or names only have the same source, and it is compiled once. The
code object is then given the attribute names, argument names and a file name of its own (``code.replace``),
and runs with its own globals, which hold operators and constants. A value is dropped as soon as it is dead,
as torch's own code does. A traceback shows the nodes.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import linecache
import types
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch.fx.experimental._config as fx_config
from torch.fx import Graph, Node
from torch.fx.graph import CodeGen

__all__ = ["quick_forward"]

_LONGEST_CACHED = 1 << 16  # characters; longer sources are unlikely to come twice, and would be kept alive
_LITERALS = {id(None): "None", id(True): "True", id(False): "False", id(...): "..."}
_serial = itertools.count()


def quick_forward(graph: Graph, name: str) -> FunctionType | None:
    """Return a function ``forward(self, ...)`` that runs ``graph``. None for a graph that needs torch's own
    code generation: it flattens its arguments (an exported program), takes ``*args``, or transforms its code.

    Args:
        name: of the module, for tracebacks.
    """
    codegen = graph._codegen
    if (
        type(codegen) is not CodeGen
        or codegen._body_transformer is not None
        or fx_config.enrich_profiler_metadata
    ):
        return None
    try:
        writer = _Writer(graph)
    except _NotCanonicalError:
        return None
    code = _compiled(writer.source) if len(writer.source) <= _LONGEST_CACHED else _compile(writer.source)
    filename = f"<partita>.{name}.{next(_serial)}"
    code = code.replace(
        co_names=tuple(map(writer.spelled, code.co_names)),
        co_varnames=("self", *writer.arguments, *code.co_varnames[len(writer.arguments) + 1 :]),
        co_filename=filename,
    )
    forward = FunctionType(code, writer.values, "forward", writer.defaults)
    forward.__annotations__ = writer.annotations
    _announce(filename, graph)
    return forward


class _NotCanonicalError(Exception):
    """The graph needs torch's own code generation."""


def _compile(source: str) -> CodeType:
    module = compile(source, "<partita>", "exec", dont_inherit=True)
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))


_compiled = lru_cache(maxsize=512)(_compile)


class _Writer:
    """One pass over a graph, which writes its canonical source and collects the values for it.

    Attributes:
        source: depends on the structure alone.
        values: globals of the function: operators and constants.
        arguments: names of the parameters after ``self``.
        defaults: of the last of them.
    """

    def __init__(self, graph: Graph) -> None:
        self.values: dict[str, Any] = {"__builtins__": builtins}
        self.arguments: list[str] = []
        self.annotations: dict[str, Any] = {}
        self._defaults: list[Any] = []
        self._atoms: list[str] = []
        self._names: dict[Node, str] = {}
        self._constants = 0
        self._remaining: dict[Node, int] = {}
        emit = {
            "call_function": self._function,
            "call_method": self._method,
            "call_module": self._module,
            "get_attr": self._attribute,
        }
        lines: list[str] = []
        for node in graph.nodes:
            kind = node.op
            if kind == "placeholder":
                self._argument(node)
            elif kind == "output":
                lines.append(" return " + self._text(node.args[0]))
                if node.type is not None:
                    self.annotations["return"] = node.type
            else:
                name = f"v{len(lines)}"
                self._names[node] = name
                call = emit[kind](node, len(lines))
                dead = self._dead_after(node)
                if node.users:
                    call = f"{name}={call}"
                lines.append(f" {call};{'='.join(dead)}=None" if dead else " " + call)
        numbered = "".join(f",a{number}" for number in range(len(self.arguments)))
        self.source = f"def forward(self{numbered}):\n" + "\n".join(lines) + "\n"

    @property
    def defaults(self) -> tuple[Any, ...] | None:
        return tuple(self._defaults) or None

    def spelled(self, name: str) -> str:
        """Return the real attribute name for a canonical one, and any other name as it is."""
        return self._atoms[int(name[1:])] if name[0] == "q" else name

    def _argument(self, node: Node) -> None:
        target = str(node.target)
        if not target.isidentifier() or keyword.iskeyword(target) or target in self.arguments[-1:]:
            raise _NotCanonicalError  # *args and **kwargs among them
        if node.args:
            self._defaults.append(node.args[0])
        elif self._defaults:
            raise _NotCanonicalError
        if node.type is not None:
            self.annotations[target] = node.type
        self._names[node] = f"a{len(self.arguments)}"
        self.arguments.append(target)

    def _function(self, node: Node, number: int) -> str:
        self.values[f"f{number}"] = node.target
        return f"f{number}({self._call(node.args, node.kwargs)})"

    def _method(self, node: Node, _number: int) -> str:
        owner, name = self._text(node.args[0]), self._atom(str(node.target))
        return f"{owner}.{name}({self._call(node.args[1:], node.kwargs)})"

    def _module(self, node: Node, number: int) -> str:
        return f"{self._attribute(node, number)}({self._call(node.args, node.kwargs)})"

    def _attribute(self, node: Node, _number: int) -> str:
        return "self." + ".".join(map(self._atom, str(node.target).split(".")))

    def _atom(self, name: str) -> str:
        self._atoms.append(name)
        return f"q{len(self._atoms) - 1}"

    def _call(self, args: Any, kwargs: Any) -> str:
        names = self._names
        parts = [names[arg] if type(arg) is Node else self._text(arg) for arg in args]
        for key, value in kwargs.items() if kwargs else ():
            if not key.isidentifier() or keyword.iskeyword(key):
                raise _NotCanonicalError
            parts.append(f"{key}={self._text(value)}")
        return ",".join(parts)

    def _text(self, value: Any) -> str:
        """Return source that builds ``value``: containers anew at each run, anything else by number."""
        if isinstance(value, Node):
            return self._names[value]
        literal = _LITERALS.get(id(value))
        if literal is not None:
            return literal
        if isinstance(value, slice):
            return f"slice({self._text(value.start)},{self._text(value.stop)},{self._text(value.step)})"
        if isinstance(value, list):
            return f"[{','.join(map(self._text, value))}]"
        if isinstance(value, dict):
            items = (f"{self._constant(key)}:{self._text(item)}" for key, item in value.items())
            return f"{{{','.join(items)}}}"
        if type(value) is tuple:
            return "(" + "".join(self._text(item) + "," for item in value) + ")"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._constant(type(value))}({','.join(map(self._text, value))})"
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{self._constants}"
        self._constants += 1
        self.values[name] = value
        return name

    def _dead_after(self, node: Node) -> list[str]:
        """Return the variables that ``node`` is the last to use."""
        dead = []
        for operand in node.all_input_nodes:
            users = len(operand.users)
            if users > 1:
                users = self._remaining.get(operand, users)
                self._remaining[operand] = users - 1
            if users == 1:
                dead.append(self._names[operand])
        return dead


def _announce(filename: str, graph: Graph) -> None:
    """Register a source for tracebacks and debuggers, a line a node, written when it is asked for."""
    reference = weakref.ref(graph)

    def source(_name: str) -> str:
        living = reference()
        if living is None:
            return ""
        lines = [node for node in living.nodes if node.op != "placeholder"]
        return "\n".join([f"forward of {filename}", *map(_described, lines)]) + "\n"

    linecache.lazycache(filename, {"__name__": filename, "__loader__": _loader(source)})
    weakref.finalize(graph, linecache.cache.pop, filename, None).atexit = False


def _loader(source: Callable[[str], str]) -> types.SimpleNamespace:
    return types.SimpleNamespace(get_source=source)


def _described(node: Node) -> str:
    text = f"{node.name}: {node.op}[{node._pretty_print_target(node.target)}]{node.args}"
    origin = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return " ".join([text, *(f"# {line}" for line in origin[-2:])]).replace("\n", " ")
