from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partita._torch.export.export import export_module
from partita.capture.merging.merge_modes import merge_modes
from partita.capture.merging.modes import in_mode


def _both(model: nn.Module, *args: Tensor) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    graphs = []
    for mode in (True, False):
        with in_mode(model, mode):
            graphs.append(export_module(model, args, {}, way="eager"))
    return graphs[0], graphs[1]


def _flags(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if str(node.target).endswith("training")]


def test_each_constant_follows_the_flag_of_the_module_that_it_comes_from() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2)))
    train, evaluation = _both(model, torch.randn(2, 2))
    assert merge_modes(train, evaluation, model)
    assert sorted(_flags(train)) == ["0.training", "1.0.training"]


def test_a_counter_that_only_training_moves_is_moved_by_nothing_in_evaluation() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    train, evaluation = _both(model, torch.randn(3, 2))
    assert merge_modes(train, evaluation, model)
    x = torch.randn(3, 2)
    train(x)
    train.get_submodule("0").training = False
    train(x)
    assert [train.get_buffer(f"{i}.num_batches_tracked").item() for i in range(2)] == [1, 2]


class Path(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().cos() if self.training else x.cos().sin()


class Constant(nn.Module):
    """The constants that the two modes hold have one name and other values."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0]) if self.training else x + torch.tensor([3.0, 4.0])


class Shape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0, keepdim=self.training)


class Extra(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Kind(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0, dtype=torch.float64 if self.training else torch.float32)


@pytest.mark.parametrize("kind", [Path, Constant, Shape, Extra, Kind])
def test_graphs_that_differ_otherwise_are_not_merged_and_left_as_they_were(kind: type[nn.Module]) -> None:
    model = kind()
    train, evaluation = _both(model, torch.randn(2, 2))
    before = str(train.graph)
    assert not merge_modes(train, evaluation, model)
    assert str(train.graph) == before


def test_numbers_are_chosen_when_the_graph_runs() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp(0.0, 1.0 if self.training else 2.0).roll(
                (1, 2) if self.training else (0, 1), (0, 1)
            )

    model, x = Scaled(), torch.randn(4, 4) * 3
    train, evaluation = _both(model, x)
    assert merge_modes(train, evaluation, model)
    for mode in (True, False):
        assert torch.equal(train.train(mode)(x), model.train(mode)(x))
