"""Strategies: random graphs that do all that a traced model can do, with arguments and an assignment to
pieces.

A graph is grown step by step. The `Grower` keeps, next to each value, what is known of it (shape, dtype,
which family of storages it may lie on), so that most graphs run; and next to each node what it reads and
writes, so that a test can judge, without the library's own analysis, whether two nodes really depend on
each other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from partita._torch.autograd.region_switches import (
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_AUTOCAST,
    EXIT_INFERENCE,
    SET_GRAD,
)

__all__ = ["Case", "Fact", "cases"]

SIDE = 4
FULL = (SIDE, SIDE)
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Counter(nn.Module):
    """A module that nobody knows: it counts its calls and draws a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += x.detach().float().sum()
        return x + self.calls + torch.rand(())


class Holder(nn.Module):
    """The state that every graph may use."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 16).reshape(FULL))
        self.v = nn.Parameter(torch.linspace(0.5, 1.5, 16).reshape(FULL))
        self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, SIDE))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(SIDE))
        self.frozen = torch.ones(SIDE)
        self.block = nn.Module()
        self.block.lin = nn.Linear(SIDE, SIDE)
        self.block.tied = nn.Linear(SIDE, SIDE)
        self.block.tied.weight = self.w
        self.norm = nn.BatchNorm1d(SIDE)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.seq = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(inplace=True), nn.Dropout(0.25))
        self.counter = Counter()


@dataclass(frozen=True)
class Value:
    """What is known of a node's value.

    Attributes:
        families: names of the storages that it may lie on; ``"inputs"`` for all arguments, since a caller
            may pass one twice.
        leaf: may be a view of something that requires grad and that no operator made.
        inference: made in inference mode.
        overlapping: several elements lie in one place (``expand``), so that it can't be written.
    """

    node: Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    families: frozenset[str]
    leaf: bool = False
    inference: bool = False
    overlapping: bool = False


@dataclass
class Fact:
    """What one node does: the families that it touches and writes, and whether it draws or prints."""

    touches: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    random: bool = False
    host: bool = False


@dataclass(repr=False)
class Case:
    """One test: a graph, its arguments, an assignment, options of the split; `facts` of each node by name."""

    gm: GraphModule
    args: tuple[Any, ...]
    keys: dict[str, int]
    on_conflict: Literal["error", "repair"]
    shared: Literal["replicate", "transmit", "root"]
    facts: dict[str, Fact]

    def __repr__(self) -> str:
        inputs = [
            f"{tuple(arg.shape)}{' requires grad' if arg.requires_grad else ''}"
            if isinstance(arg, torch.Tensor)
            else repr(arg)
            for arg in self.args
        ]
        lines = [f"{self.keys.get(node.name, '')!s:>3}  {node.format_node()}" for node in self.gm.graph.nodes]
        return f"Case(on_conflict={self.on_conflict}, shared={self.shared}, args={inputs})\n" + "\n".join(
            lines
        )


class Grower:
    """Grows one graph."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.graph = Graph()
        self.root = Holder()
        self.pool: list[Value] = []
        self.facts: dict[str, Fact] = {}
        self.grad = True
        self.inference = False
        self.autocast = False
        self.attributes: dict[str, Value] = {}

    # -- drawing -------------------------------------------------------------------------------------------
    # ------------------

    def chance(self, percent: int) -> bool:
        return bool(self.draw(st.integers(0, 99)) < percent)

    def choose(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def pick(self, wanted: Callable[[Value], bool] = lambda _: True) -> Value | None:
        """A value from the pool, preferably a late one."""
        options = [v for v in self.pool if wanted(v) and (not v.inference or self.inference)]
        if not options:
            return None
        back = self.draw(st.integers(0, len(options) - 1))
        return options[-1 - back]

    # -- emitting ------------------------------------------------------------------------------------------
    # ------------------

    def emit(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        reads: tuple[Value, ...] = (),
        writes: tuple[Value, ...] = (),
        views: tuple[Value, ...] = (),
        state: tuple[str, ...] = (),
        random: bool = False,
        host: bool = False,
    ) -> Value:
        """Append a node, note what it does, and put its value into the pool where ``shape`` is given."""
        lowered = [a.node if isinstance(a, Value) else a for a in args]
        node = self.graph.create_node(op, target, tuple(lowered), kwargs or {})
        own = frozenset({node.name})
        families = frozenset().union(*(v.families for v in views)) if views else own
        fact = Fact(random=random, host=host)
        for operand in (*reads, *writes, *views):
            fact.touches |= operand.families
        for operand in writes:
            fact.writes |= operand.families
        fact.touches |= set(state)
        fact.writes |= set(state)
        self.facts[node.name] = fact
        first = (*views, *reads, *writes)[:1]
        known = dtype or (first[0].dtype if first else torch.float32)
        leaf = any(v.leaf for v in views)
        overlapping = target == "expand" or any(v.overlapping for v in views)
        inference = any(v.inference for v in views) if views else self.inference
        value = Value(node, shape or FULL, known, families, leaf, inference, overlapping)
        if shape is not None:
            self.pool.append(value)
        return value

    def attribute(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Value:
        """A fresh get_attr node, or one that is there already."""
        if name in self.attributes and self.chance(50):
            return self.attributes[name]
        node = self.graph.get_attr(name)
        leaf = name in ("w", "v", "bias")
        value = Value(node, shape, dtype, frozenset({name}), leaf)
        self.attributes[name] = value
        return value

    # -- steps ---------------------------------------------------------------------------------------------
    # ------------------

    def pointwise(self) -> None:
        x = self.pick()
        if x is None:
            return
        kind = self.choose(["sin", "mul", "neg", "sigmoid", "method"])
        if kind == "mul":
            self.emit("call_function", operator.mul, (x, 1.5), shape=x.shape, reads=(x,))
        elif kind == "method":
            self.emit("call_method", "tanh", (x,), shape=x.shape, reads=(x,))
        else:
            self.emit("call_function", getattr(torch, kind), (x,), shape=x.shape, reads=(x,))

    def binary(self) -> None:
        x = self.pick()
        if x is None:
            return
        y = self.pick(lambda v: v.shape == x.shape) or x
        dtype = torch.promote_types(x.dtype, y.dtype)
        function = self.choose([operator.add, torch.mul, torch.sub, torch.maximum])
        self.emit("call_function", function, (x, y), shape=x.shape, dtype=dtype, reads=(x, y))

    def matmul(self) -> None:
        x = self.pick(lambda v: v.shape == FULL and (self.autocast or v.dtype is torch.float32))
        if x is None:
            return
        kind = self.choose(["w", "v", "value", "transposed"])
        if kind == "value":
            y = self.pick(lambda v: v.shape == FULL and (self.autocast or v.dtype is torch.float32)) or x
        elif kind == "transposed":
            weight = self.attribute("w", FULL)
            y = self.emit("call_method", "t", (weight,), views=(weight,))
        else:
            y = self.attribute(kind, FULL)
        dtype = torch.bfloat16 if self.autocast else torch.float32
        self.emit("call_function", torch.matmul, (x, y), shape=FULL, dtype=dtype, reads=(x, y))

    def bias(self) -> None:
        x = self.pick(lambda v: v.shape == FULL)
        if x is None:
            return
        b = self.attribute(self.choose(["bias", "frozen", "mean"]), (SIDE,))
        self.emit("call_function", torch.add, (x, b), shape=FULL, dtype=torch.float32, reads=(x, b))

    def module(self) -> None:
        x = self.pick(lambda v: v.shape == FULL and (self.autocast or v.dtype is torch.float32))
        if x is None:
            return
        name = self.choose(["block.lin", "block.tied", "norm", "drop", "relu", "seq", "counter"])
        if name == "relu":
            if self.writable(x):
                self.emit("call_module", name, (x,), shape=FULL, writes=(x,), views=(x,))
        elif name == "norm":
            self.emit("call_module", name, (x,), shape=FULL, reads=(x,), state=("norm",))
        elif name == "drop":
            self.emit("call_module", name, (x,), shape=FULL, views=(x,), random=True)
        elif name == "counter":
            self.emit(
                "call_module",
                name,
                (x,),
                shape=FULL,
                writes=(x,),
                views=(x,),
                state=("hidden",),
                random=True,
                host=True,
            )
        else:
            dtype = torch.bfloat16 if self.autocast else torch.float32
            weight = self.attributes.get("w")
            reads = (x, weight) if name == "block.tied" and weight is not None else (x,)
            value = self.emit(
                "call_module", name, (x,), shape=FULL, dtype=dtype, reads=reads, random=name == "seq"
            )
            self.facts[value.node.name].touches |= {"w"} if name == "block.tied" else set()
            if name == "seq":  # taken together, its modules may write or hand on what they get
                self.facts[value.node.name].writes |= x.families
                self.pool[-1] = replace(value, families=value.families | x.families, leaf=x.leaf)

    def writable(self, x: Value) -> bool:
        """Whether autograd lets this be written: mostly it must."""
        return self.free(x) or self.chance(2)

    def inplace(self) -> None:
        x = self.pick(lambda v: not v.inference or self.inference)
        if x is None or not self.writable(x):
            return
        kind = self.choose(
            ["add_", "mul_", "iadd", "setitem", "index", "copy_", "out", "foreach", "relu", "addcmul"]
        )
        if kind in ("add_", "mul_"):
            self.emit("call_method", kind, (x, 1.25), shape=x.shape, writes=(x,), views=(x,))
        elif kind == "iadd":
            y = self.pick(lambda v: v.shape == x.shape) or x
            self.emit(
                "call_function", operator.iadd, (x, y), shape=x.shape, reads=(y,), writes=(x,), views=(x,)
            )
        elif kind == "setitem":
            self.emit("call_function", operator.setitem, (x, slice(1, 3), 0.5), writes=(x,))
        elif kind == "index":
            rows = self.emit("call_function", torch.tensor, ([0, 2],), dtype=torch.long)
            self.emit("call_function", operator.setitem, (x, rows.node, -1.0), reads=(rows,), writes=(x,))
        elif kind == "copy_":
            y = self.pick(lambda v: v.shape == x.shape) or x
            self.emit("call_method", "copy_", (x, y), shape=x.shape, reads=(y,), writes=(x,), views=(x,))
        elif kind == "out":
            # out= refuses to be differentiated: detached on both sides
            a = self.emit("call_method", "detach", (x,), views=(x,))
            y = self.pick(lambda v: v.shape == x.shape and v.dtype is x.dtype) or x
            b = self.emit("call_method", "detach", (y,), views=(y,))
            self.emit(
                "call_function",
                torch.mul,
                (b, 0.5),
                {"out": a.node},
                shape=x.shape,
                reads=(b,),
                writes=(a,),
                views=(a,),
            )
        elif kind == "foreach":
            y = self.pick(lambda v: self.free(v)) or x
            self.emit(
                "call_function", torch._foreach_add_, ([x.node, y.node], 1.0), writes=(x, y), views=(x, y)
            )
        elif kind == "relu":
            self.emit(
                "call_function",
                functional.relu,
                (x,),
                {"inplace": True},
                shape=x.shape,
                writes=(x,),
                views=(x,),
            )
        else:
            self.emit("call_method", "addcmul_", (x, x, x), shape=x.shape, writes=(x,), views=(x,))

    def free(self, v: Value) -> bool:
        return not (v.leaf and self.grad) and not v.overlapping

    def view(self) -> None:
        x = self.pick(lambda v: v.shape == FULL)
        if x is None:
            return
        kind = self.choose(
            ["slice", "t", "chunk", "flat", "detach", "data", "expand", "row", "getattr", "reshape", "param"]
        )
        if kind == "slice":
            self.emit("call_function", operator.getitem, (x, slice(0, 2)), shape=(2, SIDE), views=(x,))
        elif kind == "t":
            self.emit("call_method", "t", (x,), shape=FULL, views=(x,))
        elif kind == "chunk":
            parts = self.emit("call_function", torch.chunk, (x, 2), views=(x,))
            for number in range(2):
                self.emit("call_function", operator.getitem, (parts, number), shape=(2, SIDE), views=(parts,))
        elif kind == "flat":
            y = self.emit("call_method", "contiguous", (x,), views=(x,))
            self.emit("call_method", "view", (y, -1), shape=(SIDE * SIDE,), views=(y,))
        elif kind == "detach":
            y = self.emit("call_method", "detach", (x,), shape=FULL, views=(x,))
            self.pool[-1] = replace(y, leaf=False, inference=x.inference)
        elif kind == "data":
            y = self.emit("call_function", getattr, (x, "data"), shape=FULL, views=(x,))
            self.pool[-1] = replace(y, leaf=False, inference=x.inference)
        elif kind == "expand":
            row = self.emit("call_function", operator.getitem, (x, 0), shape=(SIDE,), views=(x,))
            self.emit("call_method", "expand", (row, SIDE, SIDE), shape=FULL, views=(row,))
        elif kind == "row":
            self.emit("call_function", torch.select, (x, 0, 1), shape=(SIDE,), views=(x,))
        elif kind == "getattr":
            self.emit("call_function", getattr, (x, "T"), shape=FULL, views=(x,))
        elif kind == "reshape":
            self.emit("call_method", "reshape", (x, SIDE, SIDE), shape=FULL, views=(x,))
        else:
            weight = self.attribute("w", FULL)
            self.emit(
                "call_function", operator.getitem, (weight, slice(1, 3)), shape=(2, SIDE), views=(weight,)
            )

    def random(self) -> None:
        x = self.pick()
        kind = self.choose(["dropout", "rand_like", "rand", "bernoulli_", "functional_off"])
        if kind == "rand" or x is None:
            self.emit("call_function", torch.rand, FULL, shape=FULL, random=True)
        elif kind == "dropout":
            args = {"p": 0.5, "training": True, "inplace": False}
            self.emit("call_function", functional.dropout, (x,), args, shape=x.shape, views=(x,), random=True)
        elif kind == "functional_off":
            args = {"p": 0.5, "training": False, "inplace": False}
            self.emit("call_function", functional.dropout, (x,), args, shape=x.shape, views=(x,))
        elif kind == "rand_like":
            self.emit("call_function", torch.rand_like, (x,), shape=x.shape, reads=(x,), random=True)
        elif self.writable(x):
            self.emit(
                "call_method", "bernoulli_", (x, 0.5), shape=x.shape, writes=(x,), views=(x,), random=True
            )

    def state(self) -> None:
        """Counters, running statistics, weights that are changed under no_grad."""
        kind = self.choose(["steps", "mean", "weight", "data"])
        x = self.pick(lambda v: v.shape == FULL)
        if kind == "steps" or x is None:
            steps = self.attribute("steps", (), torch.long)
            self.emit("call_method", "add_", (steps, 1), writes=(steps,), views=(steps,))
        elif kind == "mean":
            mean = self.attribute("mean", (SIDE,))
            y = self.emit("call_method", "detach", (x,), views=(x,))
            z = self.emit("call_method", "mean", (y, 0), reads=(y,))
            self.emit("call_method", "lerp_", (mean, z, 0.1), writes=(mean,), views=(mean,), reads=(z,))
        elif kind == "data":
            weight = self.attribute(self.choose(["w", "v"]), FULL)
            data = self.emit("call_function", getattr, (weight, "data"), views=(weight,))
            self.emit("call_method", "mul_", (data, 0.9), writes=(data,), views=(data,))
        else:
            with self.grad_mode(False):
                weight = self.attribute(self.choose(["w", "v"]), FULL)
                self.emit("call_method", "mul_", (weight, 0.9), writes=(weight,), views=(weight,))

    def host(self) -> None:
        x = self.pick()
        if x is None or self.chance(50):
            self.emit("call_function", print, ("mark", len(self.facts)), host=True)
        else:
            shape = self.emit("call_method", "sum", (x,), reads=(x,))
            number = self.emit("call_method", "item", (shape,), reads=(shape,))
            self.emit("call_function", print, (number,), host=True)

    def join(self) -> None:
        x = self.pick()
        if x is None:
            return
        y = self.pick(lambda v: v.shape == x.shape and v.dtype is x.dtype) or x
        total = self.emit("call_function", torch.stack, ([x.node, y.node],), reads=(x, y))
        self.emit("call_method", "mean", (total, 0), shape=x.shape, dtype=x.dtype, reads=(total,))

    # -- regions -------------------------------------------------------------------------------------------
    # ------------------

    @contextmanager
    def grad_mode(self, enabled: bool) -> Iterator[None]:
        before = self.grad
        self.graph.call_function(SET_GRAD, (enabled,))
        self.grad = enabled
        yield
        self.graph.call_function(SET_GRAD, (before,))
        self.grad = before

    @contextmanager
    def autocast_mode(self, enabled: bool) -> Iterator[None]:
        before = self.autocast
        entered = self.graph.call_function(ENTER_AUTOCAST, ("cpu", torch.bfloat16, enabled, True))
        self.autocast = enabled
        yield
        self.graph.call_function(EXIT_AUTOCAST, (entered,))
        self.autocast = before

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        before = self.inference, self.grad
        entered = self.graph.call_function(ENTER_INFERENCE, (True,))
        self.inference, self.grad = True, False
        yield
        self.graph.call_function(EXIT_INFERENCE, (entered,))
        self.inference, self.grad = before

    def region(self, depth: int) -> None:
        kind = self.choose(["no_grad", "autocast", "autocast", "grad", "plain", "inference"])
        if kind in ("no_grad", "grad"):
            with self.grad_mode(kind == "grad"):
                self.steps(depth + 1)
        elif kind in ("autocast", "plain"):
            with self.autocast_mode(kind == "autocast"):
                self.steps(depth + 1)
        else:
            with self.inference_mode():
                self.steps(depth + 1)

    def steps(self, depth: int = 0) -> None:
        kinds = [
            self.pointwise,
            self.binary,
            self.matmul,
            self.bias,
            self.module,
            self.inplace,
            self.inplace,
            self.view,
            self.view,
        ]
        kinds += [self.random, self.state, self.host, self.join]
        if self.autocast:
            kinds += [self.matmul] * 6
        for _ in range(self.draw(st.integers(1, 9 if depth == 0 else 4))):
            if depth < 3 and self.chance(20):
                self.region(depth)
            else:
                self.choose(kinds)()

    # -- the border ----------------------------------------------------------------------------------------
    # ------------------

    def inputs(self) -> tuple[Any, ...]:
        base = torch.arange(16, dtype=torch.float32).reshape(FULL).mul(0.37).sin()
        args: list[Any] = []
        for number in range(self.draw(st.integers(1, 3))):
            node = self.graph.placeholder(f"x{number}")
            kind = self.choose(["plain", "leaf", "plain", "same", "view"])
            if kind == "leaf" or not args:
                arg = (base + number).cos().requires_grad_(kind == "leaf")
            elif kind == "same":
                arg = args[-1]
            elif kind == "view":
                arg = args[-1].detach().t() if args[-1].requires_grad else args[-1].t()
            else:
                arg = (base * (number + 1)).cos()
            args.append(arg)
            self.pool.append(Value(node, FULL, torch.float32, frozenset({"inputs"}), leaf=arg.requires_grad))
        if any(arg.requires_grad for arg in args):  # one may be a view of another that requires grad
            self.pool = [Value(v.node, v.shape, v.dtype, v.families, leaf=True) for v in self.pool]
        if self.chance(15):
            self.graph.create_node("placeholder", "unused", (), {})
            args.append(torch.zeros(2))
        if self.chance(25):
            node = self.graph.create_node("placeholder", "scale", (2.0,), {})
            if self.chance(50):
                args.append(0.5)
            x = self.pool[-1]
            self.emit("call_function", operator.mul, (x, node), shape=FULL, reads=(x,))
        return tuple(args)

    def output(self) -> None:
        def item() -> Any:
            value = self.choose(self.pool)
            return value.node

        kind = self.choose(["one", "tuple", "dict", "list", "none"])
        result: Any
        if kind == "one":
            result = self.pool[-1].node
        elif kind == "tuple":
            result = (item(), None, 3, item(), self.pool[-1].node)
        elif kind == "dict":
            result = {"a": item(), "b": [item(), "text"], "c": {"d": self.pool[-1].node}}
        elif kind == "list":
            result = [value.node for value in self.pool]
        else:
            result = None
        self.graph.output(result)


@st.composite
def cases(draw: Draw) -> Case:
    """A random graph with arguments, assigned to pieces contiguously or at random."""
    grower = Grower(draw)
    args = grower.inputs()
    for _ in range(draw(st.integers(1, 3))):
        grower.steps()
    grower.output()
    gm = GraphModule(grower.root, grower.graph)
    names = [node.name for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    return Case(
        gm=gm,
        args=args,
        keys=_assign(draw, names),
        on_conflict=draw(st.sampled_from(["repair", "error"])),
        shared=draw(st.sampled_from(["replicate", "transmit", "root"])),
        facts=grower.facts,
    )


def _assign(draw: Draw, names: list[str]) -> dict[str, int]:
    pieces = draw(st.integers(1, 4))
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, len(names)), min_size=pieces - 1, max_size=pieces - 1)))
        return {name: sum(position >= cut for cut in cuts) for position, name in enumerate(names)}
    keys = draw(st.lists(st.integers(0, pieces - 1), min_size=len(names), max_size=len(names)))
    return dict(zip(names, keys, strict=True))
