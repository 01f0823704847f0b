from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partita.capture import capture
from partita.errors import CaptureError, InfeasiblePlan
from partita.pipelining import pipe_split, pipeline
from partita.pipelining.frontends.graph.writes import (
    check_writes,
    reused_outputs,
    uncut_positions,
    why_uncut,
    written_inputs,
)


def _graph(forward: Callable[..., object], *args: Tensor, **buffers: Tensor) -> torch.fx.GraphModule:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in buffers.items():
                self.register_buffer(name, value)

        def forward(self, *args: Tensor) -> object:
            return forward(self, *args)

    return capture(Model(), args).module


def _stages(gm: torch.fx.GraphModule, first_of_second: str) -> dict[str, int]:
    stage, assignment = 0, {}
    for node in gm.graph.nodes:
        if node.name == first_of_second:
            stage = 1
        if node.op == "call_function":
            assignment[node.name] = stage
    assert stage == 1, gm.graph
    return assignment


def test_a_write_whose_memory_one_stage_alone_uses_is_fine() -> None:
    gm = _graph(lambda m, x: x.sin().mul_(2.0).cos(), torch.ones(2))
    check_writes(gm, _stages(gm, "cos"))
    check_writes(gm, _stages(gm, "mul_"))  # what is handed over is a copy


def test_later_stages_see_all_writes_of_the_stage_that_made_a_value() -> None:
    def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.sin()
        view = h.view(-1)
        h.mul_(2.0)
        return view.cos(), view

    gm = _graph(forward, torch.ones(2))
    check_writes(gm, _stages(gm, "cos"))


def _written_after_the_cut(model: nn.Module, x: Tensor) -> Tensor:
    """Both come to the second stage, where they share no memory any more."""
    h = x.sin()
    view = h.view(-1)
    h.mul_(2.0)
    return view.cos() + h


def _returned_from_before(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.sin()
    view = h.view(-1)
    return h.mul_(2.0) * 3, view


@pytest.mark.parametrize("forward", [_written_after_the_cut, _returned_from_before])
def test_a_write_that_another_value_should_show_is_refused(forward: Callable[..., object]) -> None:
    gm = _graph(forward, torch.ones(2))
    with pytest.raises(
        CaptureError, match=r"'mul_' writes to the value 'sin' in stage 1, and stages \[0, 1\]"
    ):
        check_writes(gm, _stages(gm, "mul_"))


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)


class _Views(_Dropping):
    """What dropout returns lies elsewhere than what it was given, and its two views in the same place."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.a(x))
        first, second = h.detach(), h.detach()
        pipe_split()
        first.mul_(2.0)
        return second + 1.0


class _Passed(_Dropping):
    """In evaluation dropout returns what it is given, so the write shows in both."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.drop(h)
        pipe_split()
        h.mul_(2.0)
        return h + y


@pytest.mark.parametrize(("model", "written"), [(_Views, "detach"), (_Passed, "linear")])
def test_memory_behind_dropout_is_followed_in_both_modes(model: type[nn.Module], written: str) -> None:
    with pytest.raises(CaptureError, match=f"'mul_' writes to the value '{written}' in stage 1, and stages"):
        pipeline(model(), (torch.ones(3, 2),))


def test_a_write_before_the_cut_is_seen_by_what_dropout_hands_on() -> None:
    class Before(_Dropping):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            pipe_split()
            y = self.drop(h)
            h.mul_(2.0)
            return h + y

    model, x = Before().eval(), torch.randn(3, 2)
    pipe = pipeline(model, (x,))
    assert torch.equal(pipe(x), model(x))


def test_a_buffer_that_is_written_belongs_to_one_stage() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h = (x + model.kept).sin()
        model.kept.add_(1.0)
        return h.cos()

    gm = _graph(forward, torch.ones(2), kept=torch.zeros(2))
    check_writes(gm, _stages(gm, "cos"))
    with pytest.raises(CaptureError, match=r"'add_' writes to the buffer 'kept' in stage 1, and stages"):
        check_writes(gm, _stages(gm, "add_"))


def test_what_keeps_a_model_whole_is_named() -> None:
    """It said "at most 1 (1 units)" and not what to change."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.register_buffer("total", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.copy_(x)
            for layer in self.layers:
                x = layer(x)
                self.total.add_(x.detach())
            self.total.mul_(2.0)
            return x

    why = "no cut can go between uses of the buffer 'total', which is written to"
    with pytest.raises(InfeasiblePlan, match=rf"cut into at most 1 \(1 unit; {why}\): leave it whole"):
        pipeline(Counted(), (torch.ones(2, 4),), stages=3)
    assert why_uncut(_graph(lambda m, x: x.sin().cos(), torch.ones(2))) == ""


def test_an_input_is_written_by_the_first_stage_alone() -> None:
    gm = _graph(lambda m, x: x.add_(1.0).sin().cos(), torch.ones(2))
    check_writes(gm, _stages(gm, "sin"))
    gm = _graph(lambda m, x, y: x.sin() + y.add_(1.0), torch.ones(2), torch.ones(2))
    with pytest.raises(CaptureError, match="writes to the model's input 'args_1' in stage 1"):
        check_writes(gm, _stages(gm, "add_"))


def test_batch_norm_does_not_return_its_running_mean() -> None:
    """Its schema says that it may."""
    gm = capture(nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()), (torch.ones(3, 2),)).module
    check_writes(gm, _stages(gm, "relu"))


def test_only_inputs_that_are_written_are_named() -> None:
    gm = _graph(lambda m, x, y, z: x.add_(y).view(-1) + z, torch.ones(2), torch.ones(2), torch.ones(2))
    assert len(written_inputs(gm)) == 1
    assert written_inputs(_graph(lambda m, x: x + 1, torch.ones(2))) == frozenset()


def test_outputs_in_a_buffer_that_is_written_are_found_also_through_views() -> None:
    def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model.kept.copy_(x)
        return x * 2, model.kept.view(2, 1), model.still.view(2, 1)

    gm = _graph(forward, torch.ones(2), kept=torch.zeros(2), still=torch.zeros(2))
    outputs = next(iter(reversed(gm.graph.nodes))).args[0]
    assert isinstance(outputs, (tuple, list))
    assert reused_outputs(gm) == {1}


def _written_late(model: nn.Module, x: Tensor) -> Tensor:
    h = (x * model.calls).sin()
    model.calls.add_(1)
    return h.cos()


def _writes_its_input(model: nn.Module, x: Tensor) -> Tensor:
    h = x.sin()
    x.add_(1)
    return h.cos()


@pytest.mark.parametrize(
    "forward", [_written_late, _writes_its_input, _written_after_the_cut, _returned_from_before]
)
def test_no_unit_ends_where_a_cut_would_be_refused(forward: Callable[..., object]) -> None:
    gm = _graph(forward, torch.ones(2), calls=torch.ones(()))
    nodes = list(gm.graph.nodes)
    uncut = uncut_positions(gm)
    for position, node in enumerate(nodes[:-1]):
        if node.op != "call_function" or nodes[position + 1].op != "call_function":
            continue
        try:
            check_writes(gm, _stages(gm, nodes[position + 1].name))
        except CaptureError:
            assert position in uncut
        else:
            assert position not in uncut
    assert uncut


def test_without_writes_a_cut_may_lie_anywhere() -> None:
    assert not uncut_positions(_graph(lambda m, x: x.sin().cos(), torch.ones(2)))
