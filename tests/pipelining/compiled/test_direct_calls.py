"""Calls that go round Dynamo and AOTAutograd give what they gave, and go back to Dynamo where it would look
again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.pipelining.models import NORMED, PLAIN, SKIP, TRANSFORMER, Case
from tests.pipelining.running import cut, piped
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from partita.errors import ExecutionError
from partita.pipelining import get_schedule_class
from partita.pipelining.compiled.ahead import AheadOfStep, compiling_ahead
from partita.pipelining.compiled.artifacts import artifacts_for
from partita.pipelining.compiled.direct_calls import DirectCalls
from partita.pipelining.interface.compile_options import CompileOptions
from partita.planning import v_placement

EAGER = CompileOptions("aot_eager")


class Counted:
    """A function of ``torch.compile``, and how many of its calls have gone to Dynamo."""

    def __init__(self, function: Callable[..., Any], options: CompileOptions = EAGER) -> None:
        torch.compiler.reset()
        self._run = torch.compile(function, backend=artifacts_for(options).backend, fullgraph=True)
        self.by_dynamo = 0
        self.calls = DirectCalls(self._counted)

    def _counted(self, *values: Any) -> Any:
        self.by_dynamo += 1
        return self._run(*values)


def _tensors(result: Any) -> tuple[Any, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _passed(
    function: Callable[..., Any], values: tuple[Any, ...], layout: Callable[[Tensor], Tensor] = torch.clone
) -> list[Any]:
    """Results, gradients and what has become of the arguments, of one call and its backward pass."""
    copies = [
        value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for value in values
    ]
    results = _tensors(function(*copies))
    torch.manual_seed(7)
    roots = [value for value in results if isinstance(value, Tensor) and value.grad_fn is not None]
    if roots:
        torch.autograd.backward(roots, [layout(torch.randn_like(root)) for root in roots])
    trained = [value for value in copies if isinstance(value, Tensor) and value.requires_grad]
    return [*results, *(value.grad for value in trained), *copies]


def _assert_equal(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        if not isinstance(one, Tensor):
            assert one == other
            continue
        assert torch.equal(one, other)
        assert (one.requires_grad, one.is_leaf, one.stride()) == (
            other.requires_grad,
            other.is_leaf,
            other.stride(),
        )


def _affine(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return functional.linear(x, weight, bias)


def _several(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Any, ...]:
    h = functional.linear(x, weight, bias)
    return h, h.argmax(-1), h.sin(), x, h.detach().exp()


def _normalised(weight: Tensor, mean: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    variance = torch.ones_like(mean)
    return (functional.batch_norm(x @ weight, mean, variance, training=True),)


def _on_three_axes(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Its matrix product returns a view that nobody else sees the base of."""
    return torch.matmul(x[None].expand(2, -1, -1), weight)


def _sizes(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Any, ...]:
    return x.shape[0], x @ weight, None, x.shape[1] * 1.5


def _untrained(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """Has no backward graph."""
    return x.detach() @ weight.detach() + bias.detach()


def _handed_back(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return bias, (x @ weight).sin(), x


def _dropped(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return (x @ weight).relu() * 2


ARGUMENTS = (
    torch.randn(4, 4, requires_grad=True),
    torch.randn(4, requires_grad=True),
    torch.randn(3, 4, requires_grad=True),
)


@pytest.mark.parametrize("function", [_affine, _several, _on_three_axes, _sizes, _handed_back, _dropped])
def test_later_calls_do_not_go_through_dynamo_and_give_the_same(function: Callable[..., Any]) -> None:
    counted = Counted(function)
    expected = _passed(function, ARGUMENTS)
    for _ in range(5):
        _assert_equal(_passed(counted.calls, ARGUMENTS), expected)
    assert counted.by_dynamo == 2  # the second one has a backward graph


def test_what_has_no_backward_graph_goes_round_dynamo_at_once() -> None:
    counted = Counted(_untrained)
    for _ in range(3):
        _assert_equal(_passed(counted.calls, ARGUMENTS), _passed(_untrained, ARGUMENTS))
    assert counted.by_dynamo == 1
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(counted.calls(*ARGUMENTS), _untrained(*ARGUMENTS))
    assert counted.by_dynamo == 2


def test_a_buffer_that_is_written_is_written_and_its_version_counts() -> None:
    values = (ARGUMENTS[0], torch.zeros(4), ARGUMENTS[2])
    counted = Counted(_normalised)
    expected = _passed(_normalised, values)
    for _ in range(4):
        _assert_equal(_passed(counted.calls, values), expected)
    assert counted.by_dynamo == 2
    mean = torch.zeros(4)
    before = mean._version
    counted.calls(ARGUMENTS[0], mean, ARGUMENTS[2])
    assert mean._version > before
    assert counted.by_dynamo == 2


def _no_gradient() -> AbstractContextManager[Any]:
    return torch.no_grad()


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


CHANGES: dict[str, tuple[Callable[[tuple[Any, ...]], tuple[Any, ...]], Callable[[], Any]]] = {
    "frozen": (lambda v: (v[0].detach(), *v[1:]), nullcontext),
    "batch": (lambda v: (*v[:2], torch.ones(5, 4, requires_grad=True)), nullcontext),
    "layout": (lambda v: (*v[:2], torch.ones(4, 3).t().requires_grad_()), nullcontext),
    "double": (lambda v: tuple(value.detach().double().requires_grad_() for value in v), nullcontext),
    "no gradients": (lambda v: v, _no_gradient),
    "autocast": (lambda v: v, _autocast),
    "default dtype": (lambda v: v, nullcontext),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_dynamo_would_look_again_it_does(change: str) -> None:
    changed, state = CHANGES[change]
    counted = Counted(_affine)
    for _ in range(3):
        _passed(counted.calls, ARGUMENTS)
    assert counted.by_dynamo == 2
    before = torch.get_default_dtype()
    if change == "default dtype":
        torch.set_default_dtype(torch.float64)
    try:
        values = changed(ARGUMENTS)
        for _ in range(4):
            with state():
                expected, results = _affine(*values), counted.calls(*values)
            _assert_equal([results], [expected])
            if results.requires_grad:
                results.sum().backward()
    finally:
        torch.set_default_dtype(before)
    assert counted.by_dynamo > 2
    calls = counted.by_dynamo
    _assert_equal(_passed(counted.calls, ARGUMENTS), _passed(_affine, ARGUMENTS))
    assert counted.by_dynamo == calls


@pytest.mark.parametrize("forward", [nullcontext, _autocast])
def test_a_backward_pass_under_autocast_computes_as_dynamos(forward: Callable[[], Any]) -> None:
    counted = Counted(_affine)
    gradients = []
    for calls in (_affine, counted.calls, counted.calls, counted.calls):
        weight, bias, x = (value.detach().requires_grad_() for value in ARGUMENTS)
        with forward():
            result = calls(weight, bias, x)
        with _autocast():
            result.backward(torch.full_like(result, 1.001))
        gradients.append((weight.grad, x.grad))
    for gradient in gradients[1:]:
        assert torch.equal(torch.cat(gradient), torch.cat(gradients[0]))
    assert counted.by_dynamo == 2


def test_two_arguments_that_are_one_tensor_go_to_dynamo() -> None:
    counted = Counted(lambda first, second: first.sin() * second)
    left, right = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for _ in range(3):
        counted.calls(left, right).sum().backward()
    assert counted.by_dynamo == 2
    left.grad = None
    counted.calls(left, left).sum().backward()
    torch.testing.assert_close(left.grad, left.detach().cos() + left.detach().sin())
    assert counted.by_dynamo == 3


def test_a_stage_is_called_by_name_too_and_a_wrong_call_is_told_what_is_missing() -> None:
    stage = cut(PLAIN, 2, compile="aot_eager").build_stage(0, "cpu").module
    (x,), _, _ = PLAIN.data(2)
    assert isinstance(stage, GraphModule)
    (name,) = [node.target for node in stage.graph.find_nodes(op="placeholder")]
    for _ in range(3):
        (result,) = _tensors(stage(**{name: x}))
        (expected,) = _tensors(stage(x))
        assert torch.equal(result, expected)
        expected.sum().backward()
        with pytest.raises(TypeError, match="missing 1 required"):
            stage()
        with pytest.raises(TypeError, match="positional arguments"):
            stage(x, x)


def test_constants_are_compared() -> None:
    counted = Counted(lambda x, twice: x * 2 if twice else x + 1)
    x = torch.ones(2, requires_grad=True)
    for twice in (True, False, True, False, True, False):
        result = counted.calls(x, twice)
        assert torch.equal(result, x * 2 if twice else x + 1)
        result.sum().backward()
    assert counted.by_dynamo == 4


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph")  # torch 2.12
def test_a_stance_that_is_set_later_holds() -> None:
    counted = Counted(_affine)
    for _ in range(3):
        _passed(counted.calls, ARGUMENTS)
    with torch.compiler.set_stance("force_eager"):
        result = counted.calls(*ARGUMENTS)
    assert type(result.grad_fn).__name__ == "AddmmBackward0"
    assert type(counted.calls(*ARGUMENTS).grad_fn).__name__ == "CompiledFunctionBackward"


def test_results_that_are_views_of_arguments_keep_their_frame() -> None:
    def view(weight: Tensor, bias: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight, x.t()

    counted = Counted(view)
    for _ in range(4):
        _, transposed = counted.calls(*ARGUMENTS)
        assert transposed._base is ARGUMENTS[2]
    assert counted.by_dynamo == 4


def test_a_subclass_keeps_its_frame() -> None:
    counted = Counted(_affine)
    values = [value.detach() for value in ARGUMENTS]
    for _ in range(3):
        result = counted.calls(TwoTensor(values[0], values[0]), *values[1:])
        torch.testing.assert_close(result.a, _affine(*values))
    assert counted.by_dynamo == 3


def test_symbolic_sizes_keep_their_frame() -> None:
    counted = Counted(lambda weight, x: (x @ weight).view(-1, 2))
    for batch in (3, 3, 3, 4, 5, 6, 5):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(counted.calls(ARGUMENTS[0], x), (x @ ARGUMENTS[0]).view(-1, 2))


def test_what_is_saved_and_then_written_is_refused_as_ever() -> None:
    counted = Counted(lambda weight, x: (x @ weight).sin())
    x = torch.ones(3, 4)
    for _ in range(3):
        counted.calls(ARGUMENTS[0], x).sum().backward()
    result = counted.calls(ARGUMENTS[0], x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
    assert counted.by_dynamo == 2


def test_a_pass_that_keeps_its_graph_runs_twice_and_a_second_derivative_is_refused() -> None:
    counted = Counted(lambda weight, x: (x @ weight).sin())
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    for _ in range(3):
        counted.calls(weight, x).sum().backward()
    weight.grad = None
    loss = counted.calls(weight, x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (once,) = torch.autograd.grad((x @ weight).sin().sum(), weight)
    torch.testing.assert_close(weight.grad, 2 * once)
    (gradient,) = torch.autograd.grad(counted.calls(weight, x).sum(), weight, create_graph=True)
    assert torch.equal(gradient, once)
    with pytest.raises(ExecutionError, match="no second derivative"):
        gradient.sum().backward()
    assert counted.by_dynamo == 2


def test_a_backward_pass_that_is_to_be_deterministic_needs_such_a_forward_pass() -> None:
    counted = Counted(lambda weight, x: (x @ weight).sin())
    for _ in range(3):
        loss = counted.calls(ARGUMENTS[0], ARGUMENTS[2]).sum()
        loss.backward(retain_graph=True)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ExecutionError, match="turn it on before both"):
            loss.backward()
        counted.calls(ARGUMENTS[0], ARGUMENTS[2]).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_hooks_of_saved_tensors_are_called_as_before() -> None:
    counted = Counted(lambda weight, x: (x @ weight).sin())
    for _ in range(3):
        counted.calls(ARGUMENTS[0], ARGUMENTS[2]).sum().backward()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
        expected = _passed(lambda weight, x: (x @ weight).sin(), (ARGUMENTS[0], ARGUMENTS[2]))
        in_eager = len(packed)
        _assert_equal(_passed(counted.calls, (ARGUMENTS[0], ARGUMENTS[2])), expected)
    assert len(packed) - in_eager == in_eager


def test_a_compiler_that_expects_a_layout_gets_gradients_in_it() -> None:
    strides: list[tuple[int, ...]] = []

    def compiler(gm: GraphModule, _: Any) -> Callable[..., Any]:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]

        def run(*values: Any) -> Any:
            strides.extend(
                value.stride() for name, value in zip(names, values, strict=True) if "tangents" in name
            )
            return gm.forward(*values)

        return run

    counted = Counted(lambda weight, x: (x @ weight).sin(), CompileOptions(compiler))
    for _ in range(4):
        _passed(counted.calls, (ARGUMENTS[0], ARGUMENTS[2]), lambda seed: seed.t().contiguous().t())
    assert strides == [(4, 1)] * 4
    assert counted.by_dynamo == 2


@pytest.mark.parametrize("kind", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("case", [PLAIN, NORMED, SKIP, TRANSFORMER], ids=lambda case: case.name)
def test_the_second_step_of_a_pipeline_goes_round_dynamo(
    case: Case, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_thread: dict[int, list[str]] = {}
    run_watched = DirectCalls._watched

    def note(event: str) -> None:
        by_thread.setdefault(threading.get_ident(), []).append(event)  # a rank is a thread here

    def watched(self: DirectCalls, values: tuple[Any, ...]) -> Any:
        note("by Dynamo")
        return run_watched(self, values)

    def two_steps(runner: Any, *_: Any) -> None:
        args, kwargs, target = case.data(8)
        for _ in range(2):
            runner.step(*args, target=target, **kwargs)
            note("step")

    monkeypatch.setattr(DirectCalls, "_watched", watched)
    placement = v_placement(4, 2) if kind == "ZBVZeroBubble" else None
    piped(cut(case, 4, compile="aot_eager"), case, get_schedule_class(kind), 4, placement, two_steps)
    for events in by_thread.values():
        assert "by Dynamo" in events
        assert events[-2:] == ["step", "step"]


def test_nothing_runs_ahead_of_a_step() -> None:
    """A stage that counts its calls was one ahead: a new kind of step with microbatches of a known size."""

    def count(x: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1)
        return x * calls

    counted, x, calls = Counted(count), torch.ones(2, requires_grad=True), torch.zeros(())
    for _ in range(3):
        counted.calls(x, calls).sum().backward()
    assert counted.by_dynamo < 3
    with compiling_ahead(AheadOfStep()):
        counted.calls(x, calls)
    assert calls == 3
