from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

from partita.graph.cost import NodeCost, estimate, measure


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(self.norm(self.layer(x)), 0.5, True)
        low, high = torch.aminmax(h)
        return h + low + high


def _costs(model: nn.Module, *args: Tensor, **options: object) -> dict[str, NodeCost]:
    return {cost.name: cost for cost in measure(symbolic_trace(model), args, **options)}  # type: ignore[arg-type]


def test_every_node_that_computes_has_a_cost_and_bytes() -> None:
    costs = _costs(Model(), torch.randn(8, 64))
    assert {"layer", "norm", "dropout", "aminmax", "add_1"} <= costs.keys()
    assert "x" not in costs
    assert costs["layer"].output_bytes == 8 * 64 * 4
    assert costs["aminmax"].output_bytes == 8
    assert all(cost.forward_s > 0.0 for cost in costs.values())
    assert all(costs[name].backward_s > 0.0 for name in ("layer", "norm", "dropout"))


def test_what_needs_no_gradient_costs_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)
    assert all(cost.backward_s == 0.0 for cost in _costs(model, torch.randn(2, 4)).values())


def test_nothing_changes_but_what_is_measured() -> None:
    model, x = Model(), torch.randn(8, 64)
    before, input_before, state = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    _costs(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(x, input_before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_input_that_the_graph_writes_to_is_left_as_it_was() -> None:
    x = torch.zeros(3)
    assert [cost.name for cost in measure(symbolic_trace(lambda x: x.add_(1.0) * 2), (x,))] == ["add_", "mul"]
    assert torch.equal(x, torch.zeros(3))


def test_progress_goes_to_one() -> None:
    shares: list[float] = []
    _costs(nn.ReLU(), torch.randn(2), repeats=4, progress=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]


def test_gradients_are_timed_also_where_the_caller_has_them_off() -> None:
    with torch.no_grad():
        assert _costs(nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64))["_0"].backward_s > 0.0


def test_a_node_that_fails_raises_its_own_error_and_leaves_grad_mode_alone() -> None:
    with pytest.raises(RuntimeError):
        measure(symbolic_trace(lambda x, y: x @ y), (torch.randn(2, 3), torch.randn(2, 3)))
    assert torch.is_grad_enabled()


def test_without_memory_costs_are_worked_out_in_proportion_to_the_work() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).to(
        "meta"
    )
    x = torch.empty(4096, 64, device="meta")
    costs = {cost.name: cost for cost in estimate(torch.fx.symbolic_trace(model), (x,))}
    assert costs["_0"].forward_s > 0
    assert costs["_0"].backward_s > costs["_0"].forward_s / 2
    assert costs["_1"].output_bytes == 4096 * 512 * 4
    assert costs == {cost.name: cost for cost in estimate(torch.fx.symbolic_trace(model), (x,))}  # no clock
