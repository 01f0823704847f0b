from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita.capture import capture
from partita.pipelining import pipeline
from partita.pipelining.frontends.graph.units.costs import cost_model, unit_ends
from partita.pipelining.frontends.graph.units.unit_runs import GraphLoss, GraphUnit, graph_units


def units_of(model: nn.Module, *args: Tensor, loss: GraphLoss | None = None) -> list[GraphUnit]:
    whole = capture(model, args).module
    return graph_units(whole, next(unit_ends(whole)), args, loss)


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(8, 8), nn.Tanh())))


def test_equal_units_share_a_run_and_others_do_not() -> None:
    units = units_of(blocks(4), torch.randn(3, 8))
    linears = units[::2]
    # The first has an input that wants no gradient.
    assert len({id(unit.run) for unit in linears}) == 2
    assert linears[1].run is linears[2].run is linears[3].run
    assert units[1].run is units[3].run is not units[7].run  # nothing comes behind the last


def test_other_shapes_dtypes_or_frozen_weights_are_other_units() -> None:
    model = blocks(4)
    model[4].requires_grad_(False)
    units = units_of(model, torch.randn(3, 8))
    assert units[2].run is not units[4].run
    assert units[2].run is units[6].run


def test_units_run_one_after_the_other_compute_what_the_model_computes() -> None:
    model, x = blocks(1), torch.randn(3, 8)
    linear, tanh = units_of(model, x)
    assert linear.run is not None
    assert tanh.run is not None
    (h,) = linear.run.call(x)
    assert torch.equal(tanh.run.call(h)[0], model(x))


def test_lengths_behind_equal_units_are_the_models_own() -> None:
    class Halves(nn.Module):
        """Gathers the last of the places that are left after two convolutions that halve them."""

        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv1d(4, 4, 2, stride=2) for _ in range(2))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            for convolution in self.convolutions:
                x, lengths = convolution(x), torch.div(lengths, 2, rounding_mode="floor")
            return x[torch.arange(len(lengths)), :, lengths - 1]

    model, args = Halves(), (torch.randn(3, 4, 16), torch.tensor([16, 12, 4]))
    whole = capture(model, args).module
    positions = [place for place, node in enumerate(whole.graph.nodes) if node.op == "call_function"]
    units = graph_units(whole, positions[:-1], args)
    assert len({id(unit.run) for unit in units}) < len(units)  # dividing is the same twice
    last = units[-1].run
    assert last is not None
    index = next(value for value in last.inputs if value.dtype == torch.int64 and value.max() == 3)
    assert index.tolist() == [3, 2, 0]


def test_parameters_lie_in_the_models_memory_but_those_that_are_written_to_do_not() -> None:
    class Clamps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.full((8,), 3.0))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.clamp_(max=1.0)
            return self.layer(x) * self.scale  # type: ignore[no-any-return]

    model, x = Clamps(), torch.randn(3, 8)
    shared = {
        parameter.data_ptr()
        for unit in units_of(model, x)
        if unit.run is not None
        for parameter in unit.run.parameters
    }
    assert torch.equal(model.scale, torch.full((8,), 3.0))
    assert model.layer.weight.data_ptr() in shared
    assert model.scale.data_ptr() not in shared


def test_a_loss_gets_what_the_model_returns_with_results_of_earlier_units() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            early = self.a(x).tanh()
            return {"late": self.c(self.b(early).tanh()), "early": early}

    model, x = Two(), torch.randn(3, 8)
    captured = capture(model, (x,))
    loss = GraphLoss(
        lambda out, target: (out["late"] - out["early"] - target).sum(), 2.0, captured.signature.unflatten
    )
    units = graph_units(captured.module, next(unit_ends(captured.module)), (x,), loss)
    run = units[-1].run
    assert run is not None
    *_, result = run.call(*run.inputs)
    out = model(x)
    assert torch.equal(result, (out["late"] - out["early"] - 2.0).sum())


def test_a_graph_of_one_unit_is_a_unit() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    (unit,) = graph_units(GraphModule(nn.Module(), graph), [], (torch.ones(2),))
    assert (unit.inputs, unit.outputs) == (("x",), ("neg",))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_units_of_tensors_that_no_backward_pass_may_save_run() -> None:
    """An example from inference mode, and a buffer that was computed from a parameter."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("scale", self.first.weight * 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x).tanh() @ self.scale)
            return out

    model = Scaled()
    with torch.inference_mode():
        x = torch.ones(3, 8)
    for unit in units_of(model, x):
        assert unit.run is not None
        _, arguments = unit.run.leaves()
        assert all(isinstance(output, Tensor) for output in unit.run.call(*arguments))
    assert pipeline(model, (x,), stages=2).num_stages == 2


class _Average(nn.Module):
    """Uses a buffer that it has written to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.b(self.a(x) * self.mean.mul_(0.5)))


class _Table(nn.Module):
    """Norms the rows of its table that it looks up, and multiplies with the table at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a = nn.Embedding(8, 8, max_norm=1.0), nn.Linear(8, 8)

    def forward(self, index: Tensor) -> Tensor:
        weight = self.table.weight.t()
        return cast("Tensor", self.a(self.table(index)) @ weight)


@pytest.mark.parametrize(
    ("model", "x", "name"),
    [
        (nn.Sequential(nn.Linear(8, 8), _Average(), nn.Tanh(), _Average()), torch.randn(3, 8), "mul"),
        (_Table(), torch.arange(4), "linear"),
    ],
    ids=["a buffer", "a parameter"],
)
def test_a_unit_that_runs_again_does_not_write_to_what_the_next_one_has_saved(
    model: nn.Module, x: Tensor, name: str
) -> None:
    """Measuring was torch's error about a variable that was modified in place."""
    whole = capture(model, (x,)).module
    for end in range(len(whole.graph.nodes)):
        if name in list(whole.graph.nodes)[end].name:
            cost_model(whole, [end], (x,), repeats=2)
    assert pipeline(model, (x,), stages=2).proof.holds
