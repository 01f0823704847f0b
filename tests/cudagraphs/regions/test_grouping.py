from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cudagraphs.graphs import Builder, aten, build, random_graph, sync
from torch.fx import Node

from partita.cudagraphs import SavingModel, find_regions


def alternating(count: int):
    def function(b: Builder, x: Node) -> Node:
        for _ in range(count):
            x = sync(b, b.call(aten.sin.default, x))
        return x

    return function


def test_independent_branches_share_regions() -> None:
    """Two chains with a node each that can't be captured: two regions, not four."""

    def function(b: Builder, x: Node) -> list[Node]:
        ends = [b.call(aten.cos.default, sync(b, b.call(aten.sin.default, x))) for _ in range(2)]
        return ends

    assert len(find_regions(build(function)).regions) == 2


def test_a_region_that_saves_nothing_is_dissolved() -> None:
    def function(b: Builder, x: Node) -> Node:
        x = sync(b, b.call(aten.sin.default, x))
        for _ in range(9):
            x = b.call(aten.cos.default, x)
        return x

    plan = find_regions(build(function), saving=SavingModel(launch_s=1.0, replay_s=2.0))
    assert [region.launches for region in plan.regions] == [9]
    assert [region.launches for region in plan.too_small] == [2]  # sin, and the index for `sync`
    assert plan.launches_saved == 8
    assert plan.regions[0].saved_s > 4.9  # 9 launches less 2 s of replay and two copies


def test_a_region_that_reads_from_one_that_is_dissolved_pays_for_the_copies() -> None:
    """It saved something only as long as what it reads lay at a fixed address."""

    def function(b: Builder, x: Node) -> Node:
        parts = [b.call(aten.sin.default, x) for _ in range(2)]
        gate = sync(b, x)
        y = b.call(aten.add.Tensor, b.call(aten.add.Tensor, gate, parts[0]), parts[1])
        return b.call(aten.sum.default, b.call(aten.cos.default, b.call(aten.sin.default, y)))

    saving = SavingModel(launch_s=1.0, copy_s=1.0, replay_s=1.5, min_launches=5)
    plan = find_regions(build(function), saving=saving)
    # the second one: 5 launches less 1.5 s and two copies (the gate in, the sum out); then two copies more
    assert saving.saved_s(5, 2) > 0 > saving.saved_s(5, 4)
    assert [(region.launches, region.copies) for region in plan.too_small] == [(3, 1), (5, 4)]
    assert not plan.regions


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0, 10),
    st.floats(0, 10),
    st.integers(0, 4),
    st.sampled_from([1e-3, 1e12]),
)
def test_every_region_that_is_captured_saves_something(
    seed: int, launch_s: float, replay_s: float, least: int, bandwidth: float
) -> None:
    saving = SavingModel(launch_s, replay_s, bandwidth, least, copy_s=launch_s)
    plan = find_regions(build(random_graph(seed)), saving=saving)
    for region in plan.regions:
        assert region.saved_s > 0
        assert region.launches >= least
    kept = [name for region in plan.regions for name in region.nodes]
    assert len(kept) == len(set(kept))


def test_copies_count_only_what_has_no_address_of_its_own() -> None:
    def function(b: Builder, x: Node) -> tuple[Node, ...]:
        weight = b.input("weight", b.fake(4, 4))
        product = b.call(aten.mm.default, x, b.call(aten.t.default, weight))
        return (
            b.call(aten.t.default, weight),
            b.call(aten.sin.default, product),
            b.call(aten.t.default, product),
        )

    (region,) = find_regions(build(function), static_inputs={"weight"}).regions
    # in: x. Out: the sine and the product, of which a view is returned. Not: the weight, nor its view
    assert region.copies == 3


def test_values_that_only_regions_use_do_not_escape() -> None:
    def function(b: Builder, x: Node) -> Node:
        inner = b.call(aten.neg.default, x, name="inner")
        seen = b.call(aten.t.default, x, name="seen")
        return b.call(aten.add.Tensor, sync(b, inner), b.call(aten.view.default, seen, [4, 4], name="view"))

    def returned(b: Builder, x: Node) -> Node:
        fresh = b.call(aten.neg.default, x, name="fresh")
        return b.call(aten.t.default, fresh, name="view")

    assert "inner" not in find_regions(build(function)).escaping
    assert {"fresh", "view"} <= find_regions(build(returned)).escaping


def test_a_value_that_goes_into_a_container_escapes() -> None:
    graph = torch.fx.Graph()
    values, x = graph.placeholder("values"), graph.placeholder("x")
    fresh = graph.call_function(torch.sin, (x,))
    graph.call_method("append", (values, fresh))
    graph.output(())
    assert fresh.name in find_regions(torch.fx.GraphModule({}, graph)).escaping


def test_the_plan_as_text_names_regions_and_refusals() -> None:
    text = str(find_regions(build(alternating(1))))
    assert text.startswith("1 regions with 3 nodes; 1 launches saved a run\n  region_0 on cuda:0: 3 nodes, ")
    assert "not captured:\n  embedding_dense_backward" in text


def test_each_node_in_a_chain_that_can_not_be_captured_costs_one_border() -> None:
    plan = find_regions(build(alternating(50)))
    assert len(plan.regions) == 50
    assert len(plan.keys) == 50 * 4
    assert {len(region.nodes) for region in plan.regions} == {3}
