"""One trace for both modes, where the model does the same in them, and only there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.capture.forwards import OTHER, SAME, Forward, Written, default_dtype, plain, size, state
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _get_current_function_mode_stack

import partita
from partita._torch.autograd.region_switches import autocast_nesting
from partita.capture import capture
from partita.errors import CaptureError, SignatureMismatch
from partita.pipelining import SplitPoint, pipeline


def _is_the_model(forward: Forward) -> None:
    captured = capture(Written(forward), (torch.randn(2, 4),), prove=False)
    for training, module in captured.graphs().items():
        for example in (torch.randn(3, 4), torch.rand(4, 4)):
            model = Written(forward).train(training)
            partita.verify(module.train(training), model, (example,)).check()


@pytest.mark.parametrize("forward", SAME, ids=lambda forward: forward.__name__)
def test_what_is_the_same_in_both_modes_is_traced_once(forward: Forward, traces: list[bool]) -> None:
    capture(Written(forward), (torch.randn(2, 4),), prove=False)
    # torch 2.11 traces a checkpoint otherwise in each mode: it costs time, and no result
    differs = torch.__version__.startswith("2.11.") and forward.__name__ == "checkpointed"
    assert traces == ([True, False] if differs else [True])
    _is_the_model(forward)


@pytest.mark.parametrize("forward", OTHER, ids=lambda forward: forward.__name__)
def test_what_differs_is_traced_in_each_mode(forward: Forward, traces: list[bool]) -> None:
    capture(Written(forward), (torch.randn(2, 4),), prove=False)
    assert False in traces
    if forward is not default_dtype:  # which no graph holds; the proof sees it
        _is_the_model(forward)


def test_nothing_is_left_of_a_run_that_ends_at_the_first_difference() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        before = torch.get_default_dtype()
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
        torch.set_default_dtype(torch.float64)
        cast.__enter__()
        h = functional.dropout(self.one(x), 0.5, self.training)
        cast.__exit__(None, None, None)
        torch.set_default_dtype(before)
        return h

    capture(Written(forward), (torch.randn(2, 4),), prove=False)
    assert torch.get_default_dtype() is torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert autocast_nesting() == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_a_trace_that_fails(error: type[BaseException]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        raise error("no")

    model, before = Written(forward), _get_current_function_mode_stack()
    with pytest.raises((CaptureError, KeyboardInterrupt)):
        capture(model, (torch.randn(2, 4),))
    assert _get_current_function_mode_stack() == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_mode_that_is_asked_of_the_users_own_object_is_the_other_one() -> None:
    model = Written(lambda self, x: self.one(x) * (2 if self.training else 3))
    original = model.forward
    model.forward = lambda *args: original(*args)  # type: ignore[method-assign]
    module, x = capture(model, (torch.randn(2, 4),), prove=False).module.eval(), torch.randn(3, 4)
    assert torch.equal(module(x), model.eval()(x))


def test_a_model_that_computes_when_it_is_switched_is_traced_in_each_mode(traces: list[bool]) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.register_buffer("fused", torch.zeros(4, 4))

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            if not mode:
                with torch.no_grad():
                    self.fused.copy_(self.one.weight * 2)
            return self

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.one.weight * 2 if self.training else self.fused)

    graphs = capture(Fused(), (torch.randn(2, 4),), prove=False).graphs()
    assert traces == [True, False]
    assert not any("copy" in node.name for node in graphs[True].graph.nodes)


def test_a_model_that_switches_some_of_its_modules_only_is_traced_once(traces: list[bool]) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.one = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def train(self, mode: bool = True) -> nn.Module:
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.one(self.norm(x))

    model = Frozen()
    module, x = capture(model, (torch.randn(3, 4),), prove=False).module, torch.randn(5, 4)
    assert traces == [True]
    for training in (True, False):
        assert torch.equal(module(x), model.train(training)(x))


def test_a_class_is_the_users_own_while_it_is_traced(traces: list[bool]) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def __init_subclass__(cls, *, name: str) -> None:
            super().__init_subclass__()

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x)

    class Plain(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

    for model in (Named(), Plain()):
        assert capture(model, (torch.randn(2, 4),), prove=False).both_modes
    assert traces == [True, True]


def test_flex_attention_is_captured() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score + (q - k))

    module = capture(Attention(), (torch.randn(2, 2, 16, 16),), prove=False).module
    partita.verify(module, Attention(), (torch.randn(3, 2, 16, 16),)).check()


def test_a_condition_on_a_size_in_training_does_not_bind_evaluation() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        n = x.shape[0]
        if self.training:
            assert n % 2 == 0
        return self.two(self.one(x))

    model, x = Written(forward), torch.randn(3, 4)
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"one": SplitPoint.END}, prove=False)
    assert torch.equal(pipe.eval()(x), model.eval()(x))
    with pytest.raises(SignatureMismatch, match="n % 2 == 0"):
        pipe.train()(x)


def test_a_result_that_the_second_run_writes_to_is_the_first_ones() -> None:
    class Appends(nn.Module):
        def forward(self, x: Tensor, cache: list[Tensor]) -> list[Tensor]:
            cache.append(x * 2)
            return cache

    module = capture(Appends(), (torch.randn(2, 4), []), prove=False).module
    assert len(module(torch.randn(2, 4), [])) == 1


def test_numbers_that_python_draws_in_the_other_mode_are_seen() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if not self.training:
            random.random()
        return self.one(x)

    captured = capture(Written(forward), (torch.randn(2, 4),), modes="both")
    assert not captured.both_modes
    with pytest.raises(CaptureError, match="draws from Python's random"):
        capture(Written(forward).eval(), (torch.randn(2, 4),))


def test_a_branch_on_a_size_in_one_mode_is_not_taken_for_the_other() -> None:
    model = Written(size)
    pipe = pipeline(
        model, (torch.randn(2, 4),), split_spec={"one": SplitPoint.END}, modes="both", prove=False
    )
    large = torch.randn(7, 4)
    assert torch.equal(pipe.train()(large), model.train()(large))
    with pytest.raises(SignatureMismatch, match="n > 4"):
        pipe.eval()(large)
    assert torch.equal(pipe.eval()(large[:4]), model.eval()(large[:4]))


def test_a_hook_of_the_users_sees_one_run(traces: list[bool]) -> None:
    model = Written(plain)
    seen: list[bool] = []
    model.register_forward_hook(lambda module, _args, _result: seen.append(module.training))
    capture(model, (torch.randn(2, 4),), prove=False)
    assert traces == [True, False]
    assert seen == [True, False]


def test_attributes_that_a_run_changes_are_put_back_between_the_two(traces: list[bool]) -> None:
    model, x = Written(state), torch.randn(2, 4)
    captured = capture(model, (x,), prove=False)
    assert captured.both_modes
    assert traces == [True]
    assert model.calls == 0
    assert not model.cache
    assert model.count == 0
    output = captured.module.eval()(x)
    assert output.scale == 1
    assert torch.equal(output.value, Written(state)(x).value)
