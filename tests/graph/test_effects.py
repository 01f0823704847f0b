"""What each kind of node is known to do."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from tests.graph.making import effect_of, graph_of, names
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn import functional

from partita.graph.effect_rules.functions import function_rule
from partita.graph.effect_rules.node_effect import PURE
from partita.graph.effects import analyse

aten = torch.ops.aten
WRITES: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    ("add_()", ("a", 1), {}, "a"),
    ("copy_()", ("a", "b"), {}, "a"),
    ("__setitem__()", ("a", 0, 1.0), {}, "a"),
    ("__iadd__()", ("a", "b"), {}, "a"),
    ("detach_()", ("a",), {}, "a"),
    ("requires_grad_()", ("a",), {}, "a"),
    ("append()", ("a", "b"), {}, "a"),
    (torch.Tensor.add_, ("a", 1), {}, "a"),
    (torch.relu_, ("a",), {}, "a"),
    (torch.add, ("a", "b"), {"out": "c"}, "c"),
    (torch.sort, ("a",), {"out": ("b", "c")}, "bc"),
    (torch.norm, ("a",), {"out": "b"}, "b"),
    (torch.tensordot, ("a", "b"), {"out": "c"}, "c"),
    (functional.normalize, ("a",), {"out": "b"}, "b"),
    (torch._foreach_add_, (["a", "b"], 1), {}, "ab"),
    (torch._foreach_add_, (["a", "b"], ["b", "c"]), {}, "ab"),
    (aten.add_.Tensor, ("a", "b"), {}, "a"),
    (aten.add.out, ("a", "b"), {"out": "c"}, "c"),
    (aten._foreach_mul_.Scalar, (["a", "b"], 2), {}, "ab"),
    (operator.setitem, ("a", 0, "b"), {}, "a"),
    (operator.iadd, ("a", "b"), {}, "a"),
    (operator.imatmul, ("a", "b"), {}, "a"),
    (functional.relu, ("a",), {"inplace": True}, "a"),
    (functional.relu, ("a", True), {}, "a"),
    (functional.dropout, ("a", 0.5, True, True), {}, "a"),
    (functional.batch_norm, ("a", "b", "c"), {"training": True}, "bc"),
    (functional.embedding, ("a", "b"), {"max_norm": 1.0}, "b"),
    (nn.init.zeros_, ("a",), {}, "a"),
]


def _name(value: object) -> str:
    """For a test's name: the same in every process (a function's repr holds its address)."""
    return str(getattr(value, "__name__", value))[:40]


@pytest.mark.parametrize(("target", "args", "kwargs", "written"), WRITES, ids=_name)
def test_a_writer_is_known_by_what_it_writes(target: Any, args: Any, kwargs: Any, written: str) -> None:
    assert names(effect_of(target, *args, **kwargs).writes) == written


SHARES: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
    ("view()", ("a", -1), {}, "a"),
    ("t()", ("a",), {}, "a"),
    ("float()", ("a",), {}, "a"),
    ("chunk()", ("a", 2), {}, "a"),
    ("sum_to_size()", ("a", 1), {}, "a"),
    ("unflatten()", ("a", 0, (2, 2)), {}, "a"),
    ("contiguous()", ("a",), {}, "a"),
    (torch.broadcast_tensors, ("a", "b"), {}, "ab"),
    (torch.meshgrid, ("a", "b"), {}, "ab"),
    (torch.split, ("a", 2), {}, "a"),
    (torch.reshape, ("a", (-1,)), {}, "a"),
    (getattr, ("a", "T"), {}, "a"),
    (getattr, ("a", "data"), {}, "a"),
    (operator.getitem, ("a", 0), {}, "a"),
    (operator.pos, ("a",), {}, "a"),
    (list, (["a", "b"],), {}, "ab"),
    (functional.dropout, ("a",), {"training": False}, "a"),
    (aten.transpose.int, ("a", 0, 1), {}, "a"),
    (aten.unsafe_split.Tensor, ("a", 2), {}, "a"),
    (aten.add_.Tensor, ("a", "b"), {}, "a"),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "shared"), SHARES, ids=_name)
def test_a_view_shares_storage_with_its_source(target: Any, args: Any, kwargs: Any, shared: str) -> None:
    assert names(effect_of(target, *args, **kwargs).aliases) == shared


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (torch.sin, ("a",), {}),
        (torch.sort, ("a",), {}),
        (functional.relu, ("a",), {}),
        (functional.softmax, ("a", -1), {}),
        (functional.embedding, ("a", "b"), {}),
        (operator.mul, ("a", 2), {}),
        (aten.mm.default, ("a", "b"), {}),
        ("matmul()", ("a", "b"), {}),
        ("__radd__()", ("a", 1), {}),
        ("size()", ("a",), {}),
        (torch.Tensor.sin, ("a",), {}),
    ],
)
def test_plain_computation_has_no_effects(target: Any, args: Any, kwargs: Any) -> None:
    assert effect_of(target, *args, **kwargs) == PURE


RANDOM: list[tuple[Any, tuple[Any, ...], dict[str, Any], bool]] = [
    (torch.rand, (2, 2), {}, True),
    (torch.rand_like, ("a",), {}, True),
    (torch.bernoulli, ("a",), {}, True),
    (torch.manual_seed, (0,), {}, True),
    ("normal_()", ("a",), {}, True),
    (functional.dropout, ("a",), {}, True),
    (functional.dropout, ("a",), {"training": False}, False),
    (functional.gumbel_softmax, ("a",), {}, True),
    (functional.rrelu, ("a",), {}, False),
    (functional.fractional_max_pool2d, ("a", 2), {"output_size": 2}, True),
    (aten.native_dropout.default, ("a", 0.5, True), {}, True),
    (aten.native_dropout.default, ("a", 0.5, False), {}, False),
    (aten.dropout.default, ("a", 0.5, False), {}, False),
    (aten.rrelu.default, ("a",), {}, False),
    (functional.scaled_dot_product_attention, ("a", "b", "c"), {"dropout_p": 0.1}, True),
    (functional.scaled_dot_product_attention, ("a", "b", "c"), {"dropout_p": 0.0}, False),
    (functional.scaled_dot_product_attention, ("a", "b", "c"), {}, False),
]


@pytest.mark.parametrize(("target", "args", "kwargs", "random"), RANDOM, ids=_name)
def test_random_operators_are_known_and_a_literal_off_switch_is_seen(
    target: Any, args: Any, kwargs: Any, random: bool
) -> None:
    assert effect_of(target, *args, **kwargs).random == random


def test_a_switch_that_is_computed_counts_as_on() -> None:
    assert effect_of(aten.dropout.default, "a", 0.5, "b").random


def test_batch_norm_in_inference_writes_nothing() -> None:
    assert not effect_of(aten.batch_norm.default, "a", None, None, "b", "c", False, 0.1, 1e-5, False).writes
    assert (
        names(effect_of(aten.batch_norm.default, "a", None, None, "b", "c", True, 0.1, 1e-5, False).writes)
        == "bc"
    )


@pytest.mark.parametrize(
    "target", [print, torch._assert, aten._assert_async.msg, aten._assert_scalar.default]
)
def test_prints_and_assertions_are_seen_by_the_host(target: Any) -> None:
    effect = effect_of(target, "a", "text")
    assert effect.host
    assert not effect.barrier


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (torch.use_deterministic_algorithms, (True,)),
        (torch.set_default_dtype, (torch.float64,)),
        (torch.set_num_threads, (1,)),
        (torch._C._functorch._grad_increment_nesting, ()),
        (torch._C._autograd._saved_tensors_hooks_disable, ("text",)),
    ],
)
def test_what_changes_global_state_is_a_barrier(target: Any, args: Any) -> None:
    assert effect_of(target, *args).barrier


def _unknown(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


@pytest.mark.parametrize(
    ("target", "args"),
    [(_unknown, ("a", "b")), ("frobnicate()", ("a", "b")), (setattr, ("a", "x", "b"))],
    ids=["function", "method", "setattr"],
)
def test_unknown_code_reads_and_writes_all_that_it_is_given(target: Any, args: Any) -> None:
    effect = effect_of(target, *args)
    assert names(effect.writes) == names(effect.aliases) == "ab"
    assert effect.random
    assert effect.host
    assert effect.unknown


@pytest.mark.parametrize("target", [operator.methodcaller("add_", 1), operator.itemgetter(0), operator.call])
def test_what_does_as_it_is_told_is_unknown(target: Any) -> None:
    rule = function_rule(target)
    assert rule is not None
    graph = Graph()
    assert rule(graph.create_node("call_function", target, (graph.placeholder("a"),), name="called")).unknown


def test_an_aliasing_write_result_is_the_written_storage() -> None:
    gm = graph_of(lambda g: g.call_method("add_", (g.call_method("view", (g.placeholder("a"), -1)), 1)))
    effects = analyse(gm)
    assert [effects.nodes[i].name for i in effects.writers] == ["add_"]
    assert len(set(effects.storages[:3])) == 1


def test_a_list_of_tensors_lies_where_its_items_lie() -> None:
    def build(g: Graph) -> Any:
        a, b = g.placeholder("a"), g.call_function(torch.rand, (2,))
        both = g.call_function(operator.add, ([a], [b]))
        return g.call_method("zero_", (g.call_function(operator.getitem, (both, 1)),))

    effects = analyse(graph_of(build))
    place = dict(zip([node.name for node in effects.nodes], effects.storages, strict=True))
    assert set(place["getitem"]) == {*place["a"], *place["rand"]}


def test_example_values_tell_a_copy_from_a_view() -> None:
    mode = FakeTensorMode()

    def build(g: Graph, shape: tuple[int, ...]) -> Any:
        a = g.placeholder("a")
        a.meta["val"] = mode.from_tensor(torch.zeros(2, 3)).t()
        b = g.call_method("reshape", (a, shape))
        b.meta["val"] = a.meta["val"].reshape(shape)
        return g.call_method("add_", (b, 1))

    copied, viewed = (analyse(graph_of(lambda g, s=shape: build(g, s))).storages for shape in ((6,), (3, 2)))
    assert not set(copied[0]) & set(copied[1])
    assert set(viewed[0]) & set(viewed[1])


@pytest.mark.parametrize("view", [torch.ops.aten.view.default, torch.ops.aten.reshape.default])
def test_example_values_that_do_not_follow_the_storages_are_not_believed(view: Any) -> None:
    """``make_fx`` on real tensors gives each node a value of its own, in a mode of its own or in one for
    all.
    """

    def build(g: Graph, values: list[torch.Tensor]) -> Any:
        a = g.placeholder("a")
        b = g.call_function(view, (a, [6]))
        c = g.call_function(torch.ops.aten.view.default, (b, [2, 3]))
        for node, value in zip((a, b, c), values, strict=True):
            node.meta["val"] = value
        return g.call_method("add_", (c, 1))

    def fakes(modes: list[FakeTensorMode]) -> list[torch.Tensor]:
        return [mode.from_tensor(torch.zeros(2, 3)) for mode in modes]

    for values in (
        fakes([FakeTensorMode() for _ in range(3)]),
        fakes([FakeTensorMode()] * 3),
        [torch.zeros(2, 3) for _ in range(3)],
    ):
        storages = analyse(graph_of(lambda g, v=values: build(g, v))).storages
        assert set(storages[0]) & set(storages[1]) & set(storages[2])


class _Branch(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.add_(1) if self.inplace else x.sin(), 0.5, True)


def _body(inplace: bool) -> GraphModule:
    return torch.fx.symbolic_trace(_Branch(inplace))


@pytest.mark.parametrize("inplace", [True, False])
def test_a_higher_order_operator_does_what_its_bodies_do(inplace: bool) -> None:
    root = nn.Module()
    root.body, root.other = _body(inplace), _body(False)

    def build(g: Graph) -> Any:
        a, p = g.placeholder("a"), g.placeholder("p")
        return g.call_function(
            torch.ops.higher_order.cond, (p, g.get_attr("body"), g.get_attr("other"), (a,))
        )

    effects = analyse(graph_of(build, root))
    effect = next(
        effect for position, effect in effects.by_position.items() if effects.nodes[position].name == "cond"
    )
    assert effect.random
    assert ("a" in names(effect.writes)) == inplace


@pytest.mark.parametrize(
    "name",
    ["wrap_with_set_grad_enabled", "wrap_with_autocast", "invoke_subgraph", "tag_activation_checkpoint"],
)
def test_wrapping_operators_are_looked_into(name: str) -> None:
    root = nn.Module()
    root.body = _body(True)

    def build(g: Graph) -> Any:
        a = g.placeholder("a")
        return g.call_function(getattr(torch.ops.higher_order, name), (False, g.get_attr("body"), a))

    effects = analyse(graph_of(build, root))
    effect = next(iter(effects.by_position.values()))
    assert effect.random
    assert "a" in names(effect.writes)
    assert not effect.host


def test_a_triton_kernel_may_write_all_that_it_is_given() -> None:
    def build(g: Graph) -> Any:
        a = g.placeholder("a")
        kwargs = {
            "kernel_idx": 0,
            "constant_args_idx": 0,
            "grid": [(1, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": {"x": a},
        }
        return g.call_function(triton_kernel_wrapper_mutation, (), kwargs)

    effects = analyse(graph_of(build))
    assert names(next(iter(effects.by_position.values())).writes) == "a"


def test_a_custom_operator_is_known_by_its_schema() -> None:
    with torch.library._scoped_library("partita_effects", "FRAGMENT") as library:
        library.define("bump(Tensor(a!) x, Tensor[] ys, Tensor(b!)[] zs) -> ()")
        library.define("log(Tensor x) -> ()")
        effect = effect_of(torch.ops.partita_effects.bump.default, "a", ["b"], ["c"])
        assert names(effect.writes) == "ac"
        assert not effect.host
        assert effect_of(torch.ops.partita_effects.log.default, "a").host


@pytest.mark.parametrize("name", ["run_and_save_rng_state", "run_with_rng_state"])
def test_a_replayed_random_operator_is_random_and_nothing_else(name: str) -> None:
    higher_order = getattr(torch.ops.higher_order, name)
    before = () if name == "run_and_save_rng_state" else ("b",)
    effect = effect_of(higher_order, *before, aten.native_dropout.default, "a", 0.5, True)
    assert effect.random
    assert not effect.writes
    assert not effect.host


def test_where_no_node_writes_no_storage_is_asked_for() -> None:
    effects = analyse(torch.fx.symbolic_trace(nn.Linear(2, 2)))
    assert not list(effects.storages_of(effects.nodes))
