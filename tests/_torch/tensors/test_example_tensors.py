"""Example tensors whose sizes may be symbols."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from partita._torch.tensors.example_tensors import example_bytes, zeros_like_example


def test_a_symbol_counts_as_in_the_example_and_has_its_value_in_the_zeros() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    example = mode.from_tensor(torch.ones(5, 3), symbolic_context=context)
    assert example_bytes(example) == 60
    graph = Graph()
    size, other = graph.placeholder("size"), graph.placeholder("other")
    size.meta["val"], other.meta["val"] = example.shape[0], example
    for values in ([7, None], [None, torch.ones(7, 3)]):
        inputs = [node for node, value in zip((size, other), values, strict=True) if value is not None]
        zeros = zeros_like_example(example, [value for value in values if value is not None], inputs)
        assert torch.equal(zeros, torch.zeros(7, 3))


def test_without_symbols() -> None:
    example = torch.ones(2, 3, dtype=torch.float16)
    assert example_bytes(example) == 12
    assert torch.equal(zeros_like_example(example, [], []), torch.zeros(2, 3, dtype=torch.float16))
