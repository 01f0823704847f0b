"""One trace for both modes, where the model does the same in them, and only there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import partita
from partita._torch.autograd.region_switches import autocast_nesting
from partita.capture import capture
from partita.capture import export as export_file
from partita.errors import CaptureError, SignatureMismatch
from partita.pipelining import SplitPoint, pipeline

RESULTS: list[Tensor] = []
Forward = Callable[[Any, Tensor], Any]


class Written(nn.Module):
    """Runs the function that it is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.constant = torch.arange(4.0)
        self.calls = 0
        self.cache: dict[int, Tensor] = {}
        self.written = forward
        self.holder = [self]

    def forward(self, x: Tensor) -> Any:
        return self.written(self, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2 + 1


@dataclass
class Found:
    value: Tensor
    scale: int


# ---------------------------------------------------------------------- the same in both modes


def plain(self: Any, x: Tensor) -> Any:
    return self.two(torch.relu(self.one(x)))


def regions(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        scale = x.abs().amax()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.one(x / scale)
    with torch.autocast("cpu", enabled=False):
        return self.two(h.float())


def sizes(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    h = self.one(x).view(n * 2, 2).sum(1).view([n, 2])
    return {"h": h, "n": h.new_full((n, 1), 3.0), "rows": x.shape[1]}


def lists(self: Any, x: Tensor) -> Any:
    parts = list(torch.split(self.one(x), 2, dim=1))
    shape = [2, 2]
    parts.append(parts.pop(0).sum() + self.two.weight[:2, :2].reshape(shape))
    shape.append(1)
    rows = torch.stack([row * 2 for row in self.two.weight])
    largest = rows.max(dim=0)
    return parts, largest.values, [rows]


def state(self: Any, x: Tensor) -> Any:
    self.calls += 1
    if self.calls not in self.cache:
        self.cache[self.calls] = self.one(x)
    self.count.add_(1)
    return Found(self.cache[self.calls] + self.constant, self.calls)


def draws(self: Any, x: Tensor) -> Any:
    return self.one(x) + torch.rand(4) + torch.randn_like(x)


def checkpointed(self: Any, x: Tensor) -> Any:
    if self.training:
        return self.two(checkpoint(self.one, x, use_reentrant=False))
    return self.two(self.one(x))


def unused_regions(self: Any, x: Tensor) -> Any:
    if not self.training:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            pass
    return self.one(x)


SAME = [plain, regions, sizes, lists, draws, unused_regions, checkpointed]

# ----------------------------------------------------------------------------- not the same


def dropout(self: Any, x: Tensor) -> Any:
    return functional.dropout(self.one(x), 0.5, self.training)


def another_weight(self: Any, x: Tensor) -> Any:
    return (self.one if self.training else self.two)(x)


def operands(self: Any, x: Tensor) -> Any:
    a, b = self.one(x), self.two(x)
    return a - b if self.training else b - a


def slices(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h[:, :2] if self.training else h[:, 2:]


def small_constant(self: Any, x: Tensor) -> Any:
    return torch.copysign(self.one(x), torch.full((4,), 0.0 if self.training else -0.0))


def size(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    h = self.one(x)
    return h * 2 if not self.training and n > 4 else h


def size_in_both(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h * x.shape[0] if self.training else h * 3


def grad(self: Any, x: Tensor) -> Any:
    with torch.set_grad_enabled(self.training):
        h = self.one(x)
    return self.two(h)


def inference(self: Any, x: Tensor) -> Any:
    with torch.inference_mode(not self.training):
        h = torch.relu(x * 2)
    return self.two(h.clone())


def cast(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.training):
        return self.one(x).float()


def default_dtype(self: Any, x: Tensor) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if self.training else torch.float32)
    try:
        return self.one(x) + torch.ones(4)
    finally:
        torch.set_default_dtype(before)


def counter(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if self.training:
        self.count.add_(1)
    return h


def write(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if not self.training:
        torch.ops.aten.add_.Scalar(self.count, 2)
    return h


def function(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return Reversed.apply(h) if self.training else h.clone()


def function_in_evaluation(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h.clone() if self.training else Reversed.apply(h)


def script(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h if self.training else scripted(h)


def mapped(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return h * 2 if self.training else torch.vmap(torch.sin)(h)


def structure(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return {"h": h} if self.training else (h,)


def number(self: Any, x: Tensor) -> Any:
    return Found(self.one(x), 1 if self.training else 2)


def identity(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    return (h, h) if self.training else (h, self.two.weight)


def question(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if not self.training and (x > 0).all():
        h = h * 2
    return h


def answer(self: Any, x: Tensor) -> Any:
    if (x > 0).all():
        return self.one(x) if self.training else self.two(x)
    return self.one(x) * 2


def rows(self: Any, x: Tensor) -> Any:
    order = list(self.two.weight)
    if not self.training:
        order.reverse()
    return self.one(x) + order[0]


def caught(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    try:
        return self.one(h[:, :3]) if not self.training else h.sin()
    except RuntimeError:
        return h.cos()


def swallows(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    try:
        h = h.sin() if self.training else h.cos()
    except BaseException:
        return h
    return h


def mark(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    scale = 3.0 if getattr(h, "seen", False) else 2.0
    h.seen = True
    return h * scale if not self.training else h * 2.0


def root_in_a_closure(self: Any, x: Tensor) -> Any:
    return (lambda h: h * 2 if self.holder[0].training else h * 3)(self.one(x))


def assigned_buffer(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    new = torch.maximum(self.count, h.detach().abs().amax())
    if self.training:
        self.count = new
    return h / new


def mark_in_training(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if self.training:
        h.scale = 2.0
    return h * getattr(h, "scale", 3.0)


def mark_on_a_weight(self: Any, x: Tensor) -> Any:
    if self.training:
        self.one.weight.scale = 2.0
    return self.one(x) * getattr(self.one.weight, "scale", 3.0)


def past_torchs_functions(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if self.training:
        with torch._C.DisableTorchFunction():
            self.count.add_(1)
    return h


def grad_mode_left_off(self: Any, x: Tensor) -> Any:
    h = self.one(x)
    if not self.training:
        torch.set_grad_enabled(False)
    return h


def global_result(self: Any, x: Tensor) -> Any:
    RESULTS.clear()
    RESULTS.append(self.one(x))
    RESULTS.append(functional.dropout(RESULTS[0], 0.1, self.training))
    return RESULTS


def condition(self: Any, x: Tensor) -> Any:
    return torch.cond(self.one(x).sum() > 0, torch.sin, torch.cos, (Reversed.apply(x),))


OTHER = [
    root_in_a_closure,
    assigned_buffer,
    mark_in_training,
    mark_on_a_weight,
    past_torchs_functions,
    grad_mode_left_off,
    global_result,
    condition,
    dropout,
    another_weight,
    operands,
    slices,
    small_constant,
    size,
    size_in_both,
    grad,
    inference,
    cast,
    default_dtype,
    counter,
    write,
    function,
    function_in_evaluation,
    script,
    mapped,
    structure,
    number,
    identity,
    question,
    answer,
    rows,
    caught,
    swallows,
    mark,
]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The mode of each trace that is made."""
    found: list[bool] = []
    original = export_file.export_module

    def export(model: nn.Module, *args: Any, **given: Any) -> Any:
        found.append(model.training)
        return original(model, *args, **given)

    monkeypatch.setattr(export_file, "export_module", export)
    return found


def _is_the_model(forward: Forward) -> None:
    captured = capture(Written(forward), (torch.randn(2, 4),), prove=False)
    for training, module in captured.graphs().items():
        for example in (torch.randn(3, 4), torch.rand(4, 4)):
            model = Written(forward).train(training)
            partita.verify(module.train(training), model, (example,)).check()


@pytest.mark.parametrize("forward", SAME, ids=lambda forward: forward.__name__)
def test_what_is_the_same_in_both_modes_is_traced_once(forward: Forward, traces: list[bool]) -> None:
    capture(Written(forward), (torch.randn(2, 4),), prove=False)
    assert traces == [True]
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
        def forward(self, x: Tensor, found: list[Tensor]) -> list[Tensor]:
            found.append(x * 2)
            return found

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
    found = captured.module.eval()(x)
    assert found.scale == 1
    assert torch.equal(found.value, Written(state)(x).value)
