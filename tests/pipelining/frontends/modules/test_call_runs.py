from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.pipelining.frontends.modules.call_runs import CallRun, call_runs


class Block(nn.Module):
    def __init__(self, number: int, scale: float = 1.0) -> None:
        super().__init__()
        self.layer_idx, self.scale, self.layer = number, scale, nn.Linear(8, 8)

    def forward(self, x: Tensor, *, shift: float = 0.0) -> dict[str, Tensor]:
        return {"x": self.layer(x) * self.scale + shift}


class Model(nn.Module):
    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, scale) for number, scale in enumerate(scales))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=1.0)["x"]
        return x


def runs_of(model: nn.Module, x: Tensor, count: int) -> list[CallRun]:
    wanted = [(f"blocks.{number}", 0) for number in range(count)]
    calls = call_runs(model, (x,), {}, wanted, training=True)
    return [calls[place] for place in wanted]


def test_equal_blocks_share_a_run_whatever_their_number() -> None:
    calls = runs_of(Model(1.0, 1.0, 1.0, 2.0), torch.randn(3, 8, requires_grad=True), 4)
    assert calls[1].run is calls[2].run
    assert calls[3].run is not calls[2].run


def test_what_one_returns_is_what_the_next_takes() -> None:
    first, second = runs_of(Model(1.0, 1.0), torch.randn(3, 8), 2)
    assert first.outputs[0] == second.inputs[0]


def test_a_call_can_be_run_again_on_what_it_was_given() -> None:
    model, x = Model(2.0), torch.randn(3, 8)
    (call,) = runs_of(model, x, 1)
    assert torch.equal(call.run.call(*call.run.inputs)[0], model(x))
    assert call.own_s > 0.0


def test_only_wanted_calls_are_taken_down() -> None:
    calls = call_runs(Model(1.0, 1.0), (torch.randn(2, 8),), {}, [("blocks.1", 0)], training=False)
    assert list(calls) == [("blocks.1", 0)]


def test_a_call_that_fills_a_container_has_the_inputs_that_it_was_given() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(self.layer(x))
            return x + sum(cache)  # type: ignore[no-any-return]

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Caches() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            cache: list[Tensor] = []
            for block in self.blocks:
                x = block(x, cache)
            return x

    calls = runs_of(Cached(), torch.randn(3, 8), 3)
    assert [len(call.inputs) for call in calls] == [len(call.run.inputs) for call in calls] == [1, 2, 3]


class Hyper(nn.Module):
    """The weight of a layer is what another one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.weight = nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight(x.mean(0)).view(8, 8)
        return torch.func.functional_call(self.blocks[0], {"weight": weight}, (x,))  # type: ignore[no-any-return]


def test_what_functional_call_puts_in_the_place_of_a_parameter_gets_no_gradient_there() -> None:
    """Measuring asked it for its ``.grad``, of which torch warned."""
    (call,) = runs_of(Hyper(), torch.randn(3, 8), 1)
    call.run.prepare_gradients()
    assert [parameter.shape for parameter in call.run.parameters] == [torch.Size([8])]


class Forces(nn.Module):
    """A block runs by itself, and within ``torch.func.grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        (block,) = self.blocks
        return block(x) + torch.func.grad(lambda at: block(at).sum())(x)  # type: ignore[no-any-return]


def test_calls_within_a_transform_are_left_alone() -> None:
    """Their arguments were copied, which torch refuses: no such model could be cut with ``stages=``."""
    assert len(runs_of(Forces(), torch.randn(3, 8), 1)) == 1
