from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partita.pipelining.frontends.modules.costs import block_costs, unit_places
from partita.pipelining.frontends.modules.recording import record
from partita.planning import CostModel


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        for number in (x.sum(-1) > 0).long().unique().tolist():
            x = self.experts[number](x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def borders(stages: int | None) -> list[str]:
    torch.manual_seed(0)
    model = Model()
    recording = record(model, (torch.randn(3, 4),), {}, training=True, grad=True)
    return [path for path, _, _ in unit_places(model, recording, stages)[1]]


def test_blocks_are_members_of_lists_and_what_lies_in_them_where_these_are_few() -> None:
    outer = [f"layers.{number}" for number in range(4)]
    assert borders(2) == outer
    finer = borders(4)
    assert set(finer) == {*outer, *(f"layers.{number}.parts.1" for number in range(4))}


def test_experts_are_no_blocks_until_nothing_else_is_left() -> None:
    assert not any("experts" in path for path in borders(9))
    assert any("experts" in path for path in borders(10))


class Recomputed(Model):
    """Computes what its layers hold again; a module around the last two does so by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Recomputing()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return self.last(x)  # type: ignore[no-any-return]


class Recomputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.training else part(x)
        return x


def test_no_unit_begins_within_a_checkpoint() -> None:
    torch.manual_seed(0)
    model, example = Recomputed(), (torch.randn(3, 4),)
    for stages in (None, 2, 20):
        recording = record(model, example, {}, training=True, grad=True)
        assert unit_places(model, recording, stages)[1] == [("last", 0, False)]
    recording = record(model, example, {}, training=False, grad=True)
    assert ("layers.1", 0, False) in unit_places(model, recording, 2)[1]


class Uncapturable(nn.Module):
    """Equal blocks that read values of tensors; each knows its number."""

    def __init__(self, blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, number) for number in range(blocks))
        self.head = nn.Linear(width, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return self.head(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().sum()))
        return self.down(self.up(x).tanh())  # type: ignore[no-any-return]


def costs_of(model: nn.Module, x: Tensor) -> CostModel:
    recording = record(model, (x,), {}, training=True, grad=True)
    return block_costs(model, ((x,), {}), recording)[0]


def test_blocks_are_run_alone_and_equal_ones_once() -> None:
    costs = costs_of(Uncapturable(), torch.randn(8, 32))
    blocks = costs.units[:4]
    assert all((unit.backward_weight_s or 0.0) > 0.0 for unit in costs.units)
    assert costs.units[0].backward_input_s == 0.0
    assert blocks[1].spread == blocks[2].spread == blocks[3].spread
    rows = 8 * 4
    # All keep the result of tanh, and all but the first their input: the model's own is the caller's.
    assert [unit.activation_bytes for unit in blocks] == [rows * 64, *[rows * (32 + 64)] * 3]
    assert costs.units[4].activation_bytes == rows * 32 + rows * 2  # its input, and the model's result
    assert costs.exit_bytes == (rows * 32,) * 4
    assert costs.entry_bytes == (0,) * 4


def test_nothing_of_the_users_changes() -> None:
    model, x = Uncapturable(), torch.randn(8, 32)
    hooks: list[Tensor] = []
    model.head.weight.register_hook(hooks.append)
    state, python_state = torch.get_rng_state(), random.getstate()
    costs_of(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.calls.item(), model.blocks[0].seen, hooks) == (0.0, [], [])
    assert not model.blocks[0]._forward_hooks


def test_what_is_computed_between_calls_counts_with_the_unit() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            for _ in range(50):
                h = h.exp().log()
            return self.b(h)  # type: ignore[no-any-return]

    first, second = costs_of(Between(), torch.randn(512, 64)).units
    assert first.forward_s > first.backward_s / 4 > 0.0  # the backward pass of a function takes twice as long
    assert second.backward_input_s


def test_a_call_that_cannot_be_repeated_counts_as_long_as_it_took() -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.left = nn.Linear(8, 8), [1.0, 2.0]

        def forward(self, x: Tensor) -> Tensor:
            scale = self.left[0]
            self.left.clear()
            return self.layer(x) * scale  # type: ignore[no-any-return]

    first, second = costs_of(nn.Sequential(Once(), nn.Linear(8, 8)), torch.randn(4, 8)).units
    assert first.forward_s > 0.0
    assert first.backward_s == 2 * first.forward_s
    assert second.activation_bytes > 0


def test_a_call_that_returns_something_else_the_next_time_counts_as_long_as_it_took() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(8, 8), [0]

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            self.calls[0] += 1
            return (self.layer(x), x.mean()) if self.calls[0] == 1 else (self.layer(x),)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([First(), nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)[0])  # type: ignore[no-any-return]

    first, second = costs_of(Blocks(), torch.randn(4, 8)).units
    assert first.backward_s == 2 * first.forward_s > 0.0
    assert second.activation_bytes > 0


def test_a_model_on_the_meta_device_is_costed_by_its_operators_alone() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.empty(4, 8)
    assert costs_of(model, x) == costs_of(model, x)
