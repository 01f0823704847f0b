"""Building graphs, and graph modules whose code is generated on the first run."""

from __future__ import annotations

import copy
import gc
import inspect
import linecache
import operator
import pickle
import traceback
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen

from partita._torch.graph_module import quick_code
from partita._torch.graph_module.graph_copy import copy_graph
from partita._torch.graph_module.graph_pickle import GraphRecord
from partita._torch.graph_module.lazy_module import LazyGraphModule, lazy_module, mark_impure
from partita._torch.graph_module.nodes import (
    append_copy,
    append_renamed,
    copy_codegen,
    free_symbols,
    map_arguments,
    new_graph,
    signature_text,
)
from partita._torch.graph_module.quick_code import quick_forward
from partita.errors import GraphError


class Pair(NamedTuple):
    left: Any
    right: Any


def lazy(build: Any, inputs: tuple[str, ...] = ("x", "y"), root: nn.Module | None = None) -> LazyGraphModule:
    graph = Graph()
    graph.output(build(graph, *map(graph.placeholder, inputs)))
    module = lazy_module(graph, "Made", training=True)
    for name, child in root.named_children() if root is not None else ():
        module.add_module(name, child)
    return module


def is_quick(module: LazyGraphModule) -> bool:
    return type(module).forward.__code__.co_filename.startswith("<partita>")


def sum_of_two(graph: Graph, x: Node, y: Node) -> Node:
    return graph.call_function(torch.add, (x, graph.call_function(torch.sin, (y,))))


# --- graphs


def test_a_copied_node_keeps_name_type_and_metadata_but_shares_no_dict() -> None:
    source = Graph()
    x = source.placeholder("x", type_expr=torch.Tensor)
    x.meta["val"] = 1
    graph = Graph()
    copied = append_copy(graph, x, (), {})
    assert (copied.name, copied.type, copied.meta) == ("x", torch.Tensor, {"val": 1})
    assert copied.meta is not x.meta
    assert append_copy(graph, x, (), {}).name == "x_1"
    assert (
        append_renamed(graph, source.call_function(torch.sin, (x,), name="s"), (copied,), {}, torch.cos).name
        == "cos"
    )
    graph.output(copied)
    graph.lint()
    assert len(graph.nodes) == 4
    assert graph.find_nodes(op="call_function", target=torch.cos)


def test_arguments_are_mapped_in_nested_containers() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert map_arguments(((x, [x, 2]), {"a": x}), {x: y}.__getitem__) == ((y, [y, 2]), {"a": y})


def test_symbols_come_by_name() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.empty(3, 5))
    names = [str(symbol) for symbol in free_symbols([fake, fake.shape[0] * 2])]
    assert names == sorted(names)
    assert free_symbols(torch.empty(2)) == free_symbols(3) == free_symbols(None) == []


def test_a_signature_is_empty_for_plain_graphs_only() -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(2),)).module()
    assert signature_text(Graph()) == ""
    assert "PyTree" in signature_text(program.graph)
    graph = new_graph(program.graph)
    assert signature_text(graph) == ""
    copy_codegen(program.graph, graph)
    assert signature_text(graph) == signature_text(program.graph)


def test_a_copied_graph_shares_nothing_that_changes() -> None:
    module = lazy(sum_of_two)
    twin = copy_graph(module.graph)
    twin.lint()
    assert str(twin) == str(module.graph)
    next(iter(twin.nodes)).meta["mine"] = 1
    twin.set_codegen(CodeGen())
    assert "mine" not in next(iter(module.graph.nodes)).meta


# --- the lazy module


def test_nothing_is_generated_before_the_first_run() -> None:
    module = lazy(sum_of_two)
    assert isinstance(module, GraphModule)
    assert type(module).forward is LazyGraphModule._lazy_forward
    assert module._needs_recompile()
    x, y = torch.ones(2), torch.ones(2)
    assert torch.equal(module(x, y), x + y.sin())
    assert is_quick(module)
    assert torch.equal(module(y=y, x=x), x + y.sin())


def test_looking_at_the_code_brings_torchs_own() -> None:
    module = lazy(sum_of_two)
    module(torch.ones(2), torch.ones(2))
    assert "add = torch.add(x, sin)" in module.code
    assert not is_quick(module)
    assert not module._needs_recompile()
    assert torch.equal(module(torch.ones(2), torch.zeros(2)), torch.ones(2))
    module.recompile()
    module(torch.ones(2), torch.ones(2))
    assert is_quick(module)
    _LazyGraphModule.force_recompile(module)
    assert not is_quick(module)


def test_a_changed_graph_is_run_after_recompile() -> None:
    module = lazy(sum_of_two)
    x, y = torch.ones(2), torch.ones(2)
    module(x, y)
    for node in module.graph.nodes:
        if node.target is torch.sin:
            node.target = torch.cos
    module.recompile()
    assert torch.equal(module(x, y), x + y.cos())


def test_the_signature_has_the_names_of_the_inputs() -> None:
    graph = Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    n = graph.placeholder("n", default_value=3.0)
    graph.output(graph.call_function(torch.mul, (x, n)), type_expr=torch.Tensor)
    module = lazy_module(graph, "Made", training=True)
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 3.0))
    assert is_quick(module)
    assert list(inspect.signature(module.forward).parameters) == ["x", "n"]
    assert inspect.signature(module.forward).parameters["n"].default == 3.0
    assert type(module).forward.__annotations__ == {"x": torch.Tensor, "return": torch.Tensor}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        module()


def test_what_needs_torchs_own_code_gets_it() -> None:
    gm = torch.fx.symbolic_trace(lambda x, *rest, **named: torch.sin(x))
    assert quick_forward(gm.graph, "m") is None
    module = lazy_module(gm.graph, "Made", training=True)
    assert torch.equal(module(torch.ones(1), 1, 2, a=3), torch.ones(1).sin())
    transformed = lazy(sum_of_two)
    transformed.graph.on_generate_code(lambda _: lambda body: body)
    assert quick_forward(transformed.graph, "m") is None
    boxed = lazy(sum_of_two)
    boxed.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    boxed.recompile()
    inputs = [torch.ones(1), torch.zeros(1)]
    assert torch.equal(boxed(inputs), torch.ones(1))
    assert boxed._boxed_call
    assert inputs == []


def test_graphs_of_equal_structure_share_one_compilation() -> None:
    quick_code._compiled.cache_clear()
    root = nn.Module()
    root.a, root.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def block(function: Any, constant: Any, target: str, name: str) -> LazyGraphModule:
        def build(graph: Graph, x: Node) -> Node:
            value = graph.call_function(function, (graph.call_module(target, (x,)), constant))
            return graph.call_function(torch.mul, (value, graph.get_attr(f"{target}.bias")))

        return lazy(build, (name,), root)

    x = torch.ones(1, 2)
    first, second = block(torch.add, 1.0, "a", "x"), block(torch.sub, [2.0][0], "b", "other")
    assert torch.equal(first(x), (root.a(x) + 1.0) * root.a.bias)
    assert torch.equal(second(x), (root.b(x) - 2.0) * root.b.bias)
    assert torch.equal(second(other=x), second(x))
    assert quick_code._compiled.cache_info().misses == 1
    assert quick_code._compiled.cache_info().hits == 1


def test_values_are_dropped_as_soon_as_they_are_dead() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[torch.Tensor]] = []

    def watch(value: torch.Tensor) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in seen))
        result = value + 1
        seen.append(weakref.ref(result))
        return result

    def build(graph: Graph, x: Node) -> Node:
        graph.call_function(watch, (x,))  # used by nobody
        for _ in range(5):
            x = graph.call_function(watch, (x,))
        return x

    module = lazy(build, ("x",))
    module(torch.ones(1))
    assert is_quick(module)
    assert alive == [0, 0, 1, 1, 1, 1]


def test_containers_are_made_anew_at_each_run() -> None:
    kept: list[Any] = []

    def keep(*values: Any, **named: Any) -> None:
        kept.append((values, named))

    def build(graph: Graph, x: Node, y: Node) -> Any:
        graph.call_function(
            keep,
            ([1, [x, 2]], {"k": y, 3: None}),
            {"pair": Pair(x, (y, ...)), "part": slice(0, None, 2), "t": (x,)},
        )
        item = graph.call_function(operator.getitem, (x, (slice(0, 1), None, ...)))
        return {"out": [item, Pair(x, 1)], "flag": True}

    module = lazy(build)
    x, y = torch.ones(2), torch.zeros(2)
    result = module(x, y)
    module(x, y)
    assert is_quick(module)
    (first, named), (second, _) = kept
    assert first[0] == [1, [x, 2]]
    assert first[0] is not second[0]
    assert type(first[0]) is list
    assert first[1] == {"k": y, 3: None}
    assert named == {"pair": Pair(x, (y, ...)), "part": slice(0, None, 2), "t": (x,)}
    assert type(named["pair"]) is Pair
    assert result["out"][1] == Pair(x, 1)
    assert torch.equal(result["out"][0], x[0:1, None, ...])


def add_step(graph: Graph, step: tuple[int, int, int, float], values: list[Node]) -> Node:
    kind, first, second, constant = step
    left, right = values[first % len(values)], values[second % len(values)]
    if kind == 0:
        return graph.call_function(torch.sin, (left,))
    if kind == 1:
        return graph.call_function(torch.add, (left, right), {"alpha": constant})
    if kind == 2:
        return graph.call_method("mul", (left, constant))
    if kind == 3:
        return graph.call_method("add_", (graph.call_function(torch.clone, (left,)), right))
    if kind == 4:
        graph.call_function(torch.stack, ([left, right],))  # used by nobody
        return graph.call_function(torch.sub, (left, right))
    return graph.call_function(operator.getitem, ([left, right, constant], 0))


STEP = st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(0, 30), st.sampled_from([-1.5, 0.5, 2.0]))


@settings(max_examples=60, deadline=None)
@given(st.lists(STEP, max_size=12), st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_quick_code_does_what_torchs_code_does(
    steps: list[tuple[int, int, int, float]], outputs: list[int]
) -> None:
    def build(graph: Graph, x: Node, y: Node) -> Any:
        values = [x, y]
        for step in steps:
            values.append(add_step(graph, step, values))
        return [values[position % len(values)] for position in outputs]

    module = lazy(build)
    x, y = torch.randn(3), torch.randn(3)
    quick = module(x, y)
    assert is_quick(module)
    module.real_recompile()
    assert all(map(torch.equal, quick, module(x, y)))


def test_a_traceback_shows_the_node_and_its_origin() -> None:
    def build(graph: Graph, x: Node, y: Node) -> Node:
        graph.call_function(torch.sin, (x,))
        product = graph.call_function(torch.mm, (x, y))
        product.meta["stack_trace"] = 'File "model.py", line 7, in forward\n    return x @ y'
        return product

    module = lazy(build)
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(2), torch.ones(3))
    text = "".join(traceback.format_exception(caught.value))
    assert 'File "<partita>.Made.' in text
    assert "mm: call_function[torch.mm](x, y)" in text
    assert 'model.py", line 7' in text


def test_a_dead_graph_leaves_no_source_behind() -> None:
    module = lazy(sum_of_two)
    module(torch.ones(1), torch.ones(1))
    filename = type(module).forward.__code__.co_filename
    assert linecache.getlines(filename)
    del module
    gc.collect()
    assert filename not in linecache.cache


def test_attributes_of_any_name_are_found() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList([nn.Linear(2, 2)])
    root.f0 = nn.Linear(2, 2)

    def build(graph: Graph, x: Node) -> Node:
        return graph.call_module("f0", (graph.call_module("layers.0", (x,)),))

    module = lazy(build, ("x",), root)
    x = torch.ones(1, 2)
    assert torch.equal(module(x), root.f0(root.layers[0](x)))
    assert is_quick(module)


def test_impurity_survives_copies() -> None:
    module = lazy(sum_of_two)
    mark_impure(module)
    assert copy.deepcopy(module)._is_impure is True
    assert pickle.loads(pickle.dumps(module))._is_impure is True


def test_records_keep_operators_and_structure() -> None:
    def build(graph: Graph, x: Node, y: Node) -> Any:
        a = graph.call_function(torch.ops.aten.add.Tensor, (x, y), {"alpha": 2})
        b = graph.call_function(torch.ops.aten.add, (a, 1))
        c = graph.call_function(
            torch.ops.aten.clone.default, (b,), {"memory_format": torch.contiguous_format}
        )
        return {"all": [graph.call_method("to", (c, torch.float64)), b]}

    module = lazy(build)
    record = GraphRecord.of(module.graph)
    assert str(record.build()) == str(pickle.loads(pickle.dumps(record)).build()) == str(module.graph)


def test_a_symbolic_value_can_not_be_recorded() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    size = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(3)).shape[0]
    module = lazy(sum_of_two)
    next(node for node in module.graph.nodes if node.name == "add").kwargs = {"alpha": size}
    with pytest.raises(GraphError, match=r"node 'add' holds the symbolic value s\d+, which can't be pickled"):
        pickle.dumps(module)


def test_dynamo_sees_torchs_code_of_every_module_that_it_meets() -> None:
    inner = lazy(sum_of_two)
    outer = lazy(lambda graph, x, y: graph.call_module("inner", (x, y)))
    outer.add_module("inner", inner)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: outer(x, y) * 2, backend="eager", fullgraph=True)
    x, y = torch.ones(2), torch.ones(2)
    for _ in range(2):
        assert torch.equal(compiled(x, y), (x + y.sin()) * 2)
    assert not is_quick(inner)
    torch._dynamo.reset()
