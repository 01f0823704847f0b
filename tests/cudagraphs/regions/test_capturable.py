from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cudagraphs.graphs import Builder, aten, build
from torch import nn
from torch.fx import Node, symbolic_trace

from partita.cudagraphs import CaptureRules, find_regions
from partita.cudagraphs.regions.partition import example_values

CPU = torch.device("cpu")


def refused(function: Callable[..., Any], **rules: Any) -> str:
    """The only refusal, as text."""
    refusals = find_regions(build(function), rules=CaptureRules(**rules)).refusals
    assert len(refusals) == 1, refusals
    return str(refusals[0])


@torch.library.custom_op("partita_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def custom(b: Builder, x: Node) -> Node:
    return b.call(torch.ops.partita_test.twice.default, x)


def test_custom_operators_are_captured_only_when_allowed() -> None:
    text = refused(custom)
    assert "custom operator partita_test::twice" in text
    assert 'pass allow=("partita_test::twice",)' in text
    assert not find_regions(
        build(custom), rules=CaptureRules(allow=frozenset({"partita_test::twice"}))
    ).refusals


def test_an_allowed_operator_is_named_with_its_namespace() -> None:
    with pytest.raises(ValueError, match="allow names operators as 'namespace::name', got 'twice'"):
        CaptureRules(allow=frozenset({"twice"}))


def test_a_number_that_was_read_keeps_its_users_out() -> None:
    def function(b: Builder, x: Node) -> Node:
        number = b.call(aten.item.default, b.call(aten.sum.default, x), name="number")
        return b.call(aten.mul.Tensor, x, number, name="user")

    first, second = find_regions(build(function)).refusals
    assert first.node == "number"
    assert "it takes the number 'number', which the host has read from the device" in second.reason


def test_a_tensor_on_another_device_is_named() -> None:
    assert "its result lies on cpu" in refused(lambda b, x: b.call(aten._to_copy.default, x, device=CPU))


def test_two_devices_in_one_node_are_refused() -> None:
    def function(b: Builder, x: Node) -> Node:
        other = b.input("other", b.fake(4, 4, device=torch.device("cuda", 1)))
        with b.mode:
            return b.call(aten.copy_.default, x, other)

    assert "it works on cuda:0 and cuda:1 at once" in refused(function)


def test_each_device_has_regions_of_its_own() -> None:
    def function(b: Builder, x: Node) -> tuple[Node, Node]:
        other = b.input("other", b.fake(4, 4, device=torch.device("cuda", 1)))
        return b.call(aten.sin.default, x), b.call(aten.cos.default, other)

    regions = find_regions(build(function)).regions
    assert [str(region.device) for region in regions] == ["cuda:0", "cuda:1"]


def test_a_0d_cpu_tensor_is_no_number_to_an_operator_that_copies_it() -> None:
    def function(b: Builder, x: Node) -> Node:
        return b.call(aten.copy_.default, x, b.input("scalar", b.fake(device=CPU)))

    assert "'scalar' is a tensor on cpu; create it on the cuda device" in refused(function)


def test_an_index_by_integers_is_captured_and_one_by_a_mask_is_not() -> None:
    def integers(b: Builder, x: Node) -> Node:
        return b.call(aten.index.Tensor, x, [b.input("rows", b.fake(2, dtype=torch.int64))])

    def mask(b: Builder, x: Node) -> Node:
        return b.call(
            aten.index.Tensor, x, [b.input("rows", b.fake(4, dtype=torch.bool))], value=b.fake(2, 4)
        )

    assert not find_regions(build(integers)).refusals
    assert "it indexes by a mask" in refused(mask)


def test_a_generator_of_ones_own_is_refused() -> None:
    def function(b: Builder, x: Node) -> Node:
        return b.call(aten.bernoulli.p, x, 0.5, generator="its own", value=b.fake(4, 4))

    assert "it draws from a generator of its own" in refused(function)


@pytest.mark.parametrize(
    ("target", "args", "reason"),
    [
        (aten.linalg_inv_ex.default, (), "waits for the device"),
        (aten.multinomial.default, (2,), "waits for the device"),
        (aten.t_.default, (), "changes a tensor's shape or memory in place"),
    ],
)
def test_operators_that_no_tag_gives_away_are_known(target: Any, args: tuple[Any, ...], reason: str) -> None:
    assert reason in refused(lambda b, x: b.call(target, x, *args))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_is_captured_where_nothing_is_dropped(dropout_p: float) -> None:
    def function(b: Builder, x: Node) -> Node:
        heads = b.call(aten.view.default, x, [1, 1, 4, 4], value=b.fake(1, 1, 4, 4))
        attention = aten.scaled_dot_product_attention.default
        return b.call(attention, heads, heads, heads, None, dropout_p, value=b.fake(1, 1, 4, 4))

    if dropout_p:
        assert "attention with dropout" in refused(function)
    else:
        assert not find_regions(build(function), rules=CaptureRules()).refusals


def test_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(4).to_sparse()
    text = refused(lambda b, x: b.call(aten.neg.default, x, value=sparse), device_type="cpu")
    assert "is a tensor of layout sparse_coo" in text


def test_assertions_on_the_device_are_captured() -> None:
    def function(b: Builder, x: Node) -> Node:
        b.call(aten._assert_async.msg, b.call(aten.any.default, x), "message")
        return b.call(aten.sin.default, x)

    assert len(find_regions(build(function)).regions[0].nodes) == 3


def test_sizes_and_items_of_tuples_divide_no_region() -> None:
    def function(b: Builder, x: Node) -> Node:
        halves = b.call(aten.split.Tensor, x, 2)
        rows = b.call(aten.sym_size.int, x, 0)
        first = b.call(operator.getitem, halves, 0)
        return b.call(aten.add.Tensor, b.call(aten.sin.default, first), rows)

    plan = find_regions(build(function))
    assert len(plan.regions) == 1
    assert not plan.refusals


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.nonzero(x), "shape of its result depends on the data"),
        (lambda x: x.sum().item(), "the host reads a value"),
        (lambda x: x[x > 0], "it indexes by a mask"),
        (lambda x: torch.linalg.svd(x)[1], "waits for the device"),
    ],
)
def test_python_functions_are_judged_as_their_operators(function: Callable[..., Any], reason: str) -> None:
    gm = example_values(symbolic_trace(function), [Builder().fake(4, 4)])
    assert any(reason in refusal.reason for refusal in find_regions(gm).refusals)


def test_known_modules_are_captured_and_unknown_ones_are_not() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return True

    root = nn.Sequential(nn.Linear(4, 4), Own(), nn.Embedding(4, 4, max_norm=1.0))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    linear, own = graph.call_module("0", (x,)), graph.call_module("1", (x,))
    graph.output((linear, own))
    gm = example_values(torch.fx.GraphModule(root, graph), [torch.ones(4, 4)])
    plan = find_regions(gm, rules=CaptureRules("cpu"))
    assert [region.nodes for region in plan.regions] == [(linear.name,)]
    assert "nothing is known of it (unknown module '1' (Own))" in plan.refusals[0].reason


def test_a_graph_without_example_values_says_what_is_missing() -> None:
    plan = find_regions(symbolic_trace(lambda x: x.sin()))
    assert "its shapes and devices are not known; give example inputs" in str(plan.refusals[0])
