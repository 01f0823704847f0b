from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partita._torch.operators.capturable import capture_facts, has_data_dependent_size, operator_of

aten = torch.ops.aten


def test_tags_say_what_reads_the_host_and_what_has_a_shape_of_its_own() -> None:
    assert capture_facts(aten.item.default).reads_host
    assert capture_facts(aten.nonzero.default).dynamic_shape
    assert capture_facts(aten.index.Tensor).dynamic_shape
    assert capture_facts(aten.index.Tensor).indexes
    assert capture_facts(aten.index_put_.default).indexes
    assert not capture_facts(aten.index_select.default).indexes


def test_views_launch_nothing() -> None:
    assert not capture_facts(aten.view.default).launches
    assert not capture_facts(aten.split.Tensor).launches
    assert capture_facts(aten.add_.Tensor).launches
    assert capture_facts(aten.sin).launches


def test_pointwise_operators_take_numbers() -> None:
    assert capture_facts(aten.mul.Tensor).pointwise
    assert not capture_facts(aten.copy_.default).pointwise


def test_operators_that_wait_are_known_by_name() -> None:
    assert capture_facts(aten.linalg_svd.default).synchronises
    assert not capture_facts(aten.linalg_vector_norm.default).synchronises


def test_functions_and_methods_stand_for_operators() -> None:
    nodes = list(symbolic_trace(lambda x: (torch.nonzero(x), x.item(), aten.sin.default(x))).graph.nodes)
    assert [operator_of(node) for node in nodes[1:4]] == [aten.nonzero, aten.item, aten.sin.default]
    assert operator_of(nodes[0]) is None


def test_symbols_that_only_data_decides_are_seen() -> None:
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    with FakeTensorMode(shape_env=shapes):
        assert has_data_dependent_size(torch.ones(3).nonzero())
        assert not has_data_dependent_size(torch.ones(3))
