"""Which nodes must keep their order although no value flows between them."""

from __future__ import annotations

from typing import Any

import torch
from tests.graph.making import edges_of, graph_of
from torch import nn
from torch.fx import Graph

from partita.graph.effects import analyse
from partita.graph.order import order_edges


def test_a_reader_follows_the_last_writer_and_a_writer_follows_all_readers() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        a, b = g.call_function(torch.neg, (x,)), g.call_function(torch.abs, (x,))
        g.call_method("add_", (x, 1))
        return a, b, g.call_function(torch.sin, (x,))

    assert edges_of(graph_of(build)) == {
        ("neg", "add_", "storage"),
        ("abs_1", "add_", "storage"),
        ("add_", "sin", "storage"),
    }


def test_readers_among_themselves_are_free() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        return g.call_function(torch.neg, (x,)), g.call_function(torch.abs, (x,))

    assert edges_of(graph_of(build)) == set()


def test_a_write_to_a_view_comes_before_a_read_of_its_base() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        base = g.call_function(torch.exp, (x,))
        view = g.call_method("view", (base, -1))
        other = g.call_method("t", (base,))
        g.call_method("zero_", (view,))
        return g.call_function(torch.sin, (base,)), g.call_function(torch.cos, (other,))

    assert {("zero_", "sin", "storage"), ("zero_", "cos", "storage"), ("t", "zero_", "storage")} <= edges_of(
        graph_of(build)
    )


def test_random_draws_and_host_effects_each_keep_their_order() -> None:
    def build(g: Graph) -> Any:
        a = g.call_function(torch.rand, (2,))
        g.call_function(print, ("one",))
        b = g.call_function(torch.rand, (2,))
        g.call_function(print, ("two",))
        return a, b

    assert edges_of(graph_of(build)) == {("rand", "rand_1", "random"), ("print_1", "print_2", "host")}


def test_nothing_crosses_a_barrier() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        a = g.call_function(torch.sin, (x,))
        g.call_function(torch.set_num_threads, (1,))
        return a, g.call_function(torch.cos, (x,))

    assert edges_of(graph_of(build)) == {
        ("sin", "set_num_threads", "barrier"),
        ("set_num_threads", "cos", "barrier"),
    }


def test_two_names_of_one_tensor_are_one_storage() -> None:
    root = nn.Module()
    root.a = root.b = nn.Parameter(torch.ones(2))

    def build(g: Graph) -> Any:
        g.call_method("add_", (g.get_attr("a"), 1))
        return g.call_function(torch.sin, (g.get_attr("b"),))

    assert edges_of(graph_of(build, root)) == {("add_", "sin", "storage")}


def test_a_module_and_an_attribute_share_their_state() -> None:
    root = nn.Module()
    root.norm = nn.BatchNorm1d(2)

    def build(g: Graph) -> Any:
        before = g.call_function(torch.sin, (g.get_attr("norm.running_mean"),))
        g.call_module("norm", (g.placeholder("x"),))
        g.call_module("norm", (before,))
        return before

    assert edges_of(graph_of(build, root)) == {("sin", "norm", "storage"), ("norm", "norm_1", "storage")}


def test_inputs_without_metadata_may_be_one_tensor() -> None:
    def build(g: Graph) -> Any:
        x, y = g.placeholder("x"), g.placeholder("y")
        g.call_method("add_", (x, 1))
        return g.call_function(torch.sin, (y,))

    gm = graph_of(build)
    assert edges_of(gm) == {("add_", "sin", "storage")}
    assert order_edges(analyse(gm, distinct_inputs=True)) == []
    for node, value in zip(
        gm.graph.find_nodes(op="placeholder"), (torch.ones(2), torch.ones(2)), strict=True
    ):
        node.meta["val"] = value
    assert edges_of(gm) == set()


def test_edges_are_linear_in_the_uses_of_a_storage() -> None:
    def build(g: Graph) -> Any:
        x = g.placeholder("x")
        for _ in range(100):
            g.call_function(torch.sin, (x,))
            g.call_method("add_", (x, 1))
        return x

    assert len(edges_of(graph_of(build))) < 400
