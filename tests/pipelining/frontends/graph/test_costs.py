from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pipelining.models import TRANSFORMER, WIDTH
from torch import Tensor, nn

from partita.graph.liveness import borders
from partita.pipelining import pipeline
from partita.pipelining.frontends.graph.costs import _window_minima, narrow_borders
from partita.pipelining.frontends.pipeline import measure_units


def test_a_transformer_is_cut_between_its_blocks() -> None:
    model = TRANSFORMER.model()
    costs = measure_units(model, TRANSFORMER.data(2)[0])
    assert len(costs.crossing_bytes) == len(costs.units) - 1
    assert set(costs.crossing_bytes) == {2 * 6 * WIDTH * 4}  # one activation, never more
    modules = [module for unit in costs.units for module in unit.modules]
    assert {"embedding", "blocks.0.mix", "blocks.2.feed.3", "norm", "head"} <= set(modules)


def test_units_add_up_to_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    costs = measure_units(model, (torch.randn(3, 4),))
    assert sum(unit.parameters for unit in costs.units) == sum(p.numel() for p in model.parameters())
    assert sum(unit.parameter_bytes for unit in costs.units) == 4 * sum(p.numel() for p in model.parameters())
    assert costs.crossing_bytes == (3 * 6 * 4, 3 * 6 * 4)
    assert all(unit.forward_s > 0.0 for unit in costs.units)
    assert [unit.name for unit in costs.units] == ["0:linear", "1:relu", "2:linear_1"]


class Skips(nn.Module):
    """A value goes past the middle: there, two tensors cross at least."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        h = first
        for layer in self.layers[1:-1]:
            h = layer(h)
        return self.layers[-1](h + first)


def test_inside_of_a_residual_block_there_is_no_border() -> None:
    costs = measure_units(Skips(), (torch.randn(3, 4),))
    assert [unit.name for unit in costs.units] == ["0:linear", "1:add", "2:linear_4"]


class Scales(nn.Module):
    """Makes its input small, and its result large again: after the first few operations two tensors cross."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu().exp().log()
        scale = x.abs().amax(-1, keepdim=True)
        h = x / scale
        for layer in self.layers:
            h = layer(h)
        return h * scale


def test_where_stages_are_more_than_units_wider_borders_are_taken_too_and_the_plan_can_be_used_again() -> (
    None
):
    model, x = Scales(), torch.randn(3, 4)
    assert len(measure_units(model, (x,)).units) < 6
    pipe = pipeline(model, (x,), stages=6)
    assert pipe.num_stages == 6
    assert torch.equal(pipe(x), model(x))
    assert pipeline(model, (x,), plan=pipe.plan).num_stages == 6


def test_progress_is_told_and_the_model_is_as_it_was() -> None:
    model, shares = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), []
    measure_units(model, (torch.randn(3, 4),), repeats=2, progress=shares.append)
    assert shares == [0.5, 1.0]
    assert model[0].num_batches_tracked == 0
    assert model.training


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 50))
def test_window_minima_are_those_of_each_window(numbers: list[int], reach: int) -> None:
    expected = [min(numbers[max(0, i - reach) : i + reach + 1]) for i in range(len(numbers))]
    assert _window_minima(numbers, reach) == expected


def test_no_border_is_taken_where_nothing_is_computed_between_two() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    weight = graph.create_node("get_attr", "weight")
    graph.output(graph.call_function(torch.add, (a, weight)))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    nodes = list(graph.nodes)
    gaps = borders(nodes, {node: position for position, node in enumerate(nodes)})
    assert [gap.after for gap in narrow_borders(nodes, gaps)] == [1]
