from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.own_functions import Dirty
from torch import Tensor, nn
from torch._functorch.autograd_function import custom_function_call

import partita
from partita._torch.export.export import export_module
from partita._torch.export.function_call import FunctionCall
from partita.capture import capture
from partita.errors import CaptureError
from partita.graph.effects import analyse


class Reverse(torch.autograd.Function):
    """Gradient reversal: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Several(torch.autograd.Function):
    """Several results, one that is no tensor, and a backward that looks at what is needed."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, factor: int = 3) -> tuple[Tensor, Tensor, int]:
        return a * b, a + b, factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        first = gradients[0] * b * 3 + gradients[1] if ctx.needs_input_grad[0] else None
        return first, gradients[0] * a, None


class Noisy(torch.autograd.Function):
    """Draws random numbers; straight through in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.reverse = Reverse.apply  # bound before anything is traced

    def forward(self, x: Tensor) -> Tensor:
        h = self.reverse(self.a(x), 0.5)
        product, total, factor = Several.apply(h, self.b(h))
        w = Noisy.apply(self.c(product)) * factor + total
        return Dirty.apply(w.clone()) + w


class Given(nn.Module):
    """Gives a function something else than tensors."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return Reverse.apply(self.a(x), self.value)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def calls(graph: torch.fx.Graph) -> dict[str, FunctionCall]:
    return {node.name: node.target for node in graph.nodes if isinstance(node.target, FunctionCall)}


def test_a_captured_graph_calls_the_function_itself(model: Model) -> None:
    # export went into forward, and autograd differentiated the operators that it found there
    captured = capture(model, (torch.randn(3, 4),))
    partita.verify(captured.module, model, (torch.randn(3, 4),)).check()
    partita.verify(captured.module, model, (torch.randn(5, 4).requires_grad_(),)).check()
    assert [call.function for call in calls(captured.module.graph).values()] == [
        Reverse,
        Several,
        Noisy,
        Dirty,
    ]


def test_what_forward_writes_and_draws_is_known(model: Model) -> None:
    gm = capture(model, (torch.randn(3, 4),)).module
    effects = analyse(gm)
    assert [effects.nodes[position].name for position in effects.writers] == ["Dirty"]
    assert [effects.nodes[position].name for position in effects.random] == ["Noisy"]


def test_a_graph_with_functions_can_be_copied_pickled_and_printed(model: Model) -> None:
    x = torch.randn(3, 4)
    cut = partita.split(capture(model, (x,)).module, lambda node: "all").pieces[0].module
    for other in (copy.deepcopy(cut), pickle.loads(pickle.dumps(cut))):
        partita.verify(other, cut, (x,)).check()
    assert "Reverse(" in cut.code


def test_calls_are_equal_where_function_and_constants_are() -> None:
    assert FunctionCall(Reverse, (1.0,)) == FunctionCall(Reverse, (1.0,))
    assert FunctionCall(Reverse, (1.0,)) != FunctionCall(Reverse, (2.0,))
    assert len({FunctionCall(Reverse, (1.0,)), FunctionCall(Reverse, (1.0,))}) == 1


@pytest.mark.parametrize("value", [nn.Linear(2, 2), {"weight": torch.ones(2)}], ids=["module", "dict"])
def test_tensors_inside_of_other_arguments_are_refused(value: Any) -> None:
    with pytest.raises(CaptureError, match=r"Reverse.apply is given a \w+ that holds tensors"):
        capture(Given(value), (torch.randn(2, 4),))


def test_strict_mode_is_refused_since_it_loses_the_backward_pass() -> None:
    with pytest.raises(CaptureError, match="loses its backward pass"):
        export_module(Given(0.5), (torch.randn(2, 4),), {}, way="strict")


class BoundBefore(nn.Module):
    """Calls a function whose ``apply`` was looked up before anything is traced."""

    def __init__(self, apply: Any) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(4, 4), apply

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.call(h * 2) + h  # type: ignore[no-any-return]


@pytest.mark.parametrize("function", [Dirty, Noisy])
def test_an_apply_that_was_looked_up_before_is_recorded(function: Any) -> None:
    """Since torch 2.14 no Python of torch's stands before it."""
    model = BoundBefore(function.apply)
    captured = capture(model, (torch.randn(3, 4),)).module
    assert [call.function for call in calls(captured.graph).values()] == [function]
    partita.verify(captured, model, (torch.randn(5, 4).requires_grad_(),)).check()


class Scaled(torch.autograd.Function):
    """Its gradient has the wrong sign, on purpose."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return -grads[0]


@pytest.mark.parametrize("bound", [True, False])
def test_a_function_within_vmap_is_refused(bound: bool) -> None:
    """Strict mode, which was tried next, gave a graph whose gradients had the other sign."""
    function = Scaled.apply if bound else lambda row: Scaled.apply(row)
    with pytest.raises(
        CaptureError, match=r"Scaled.apply runs within a transform of torch.func \(vmap, grad"
    ):
        capture(BoundBefore(torch.vmap(function)), (torch.randn(3, 4),))


def test_functions_run_as_ever_after_a_trace(model: Model) -> None:
    capture(model, (torch.randn(3, 4),))
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
    assert torch.autograd.function.custom_function_call is custom_function_call
    x = torch.ones(2, requires_grad=True)
    Reverse.apply(x, 2.0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [-2.0, -2.0]


class Mixes(nn.Module):
    """Mixup: torch draws from a beta distribution through a ``Function`` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        share = torch.distributions.Beta(0.4, 0.4, validate_args=False).sample((len(x), 1))
        return share * x + (1 - share) * x.flip(0)


def test_a_function_of_torchs_own_modules_is_called_too() -> None:
    """The code that fx generates names what lies in torch's modules by its place there: it made an object of
    the class.
    """
    model, x = Mixes(), torch.randn(3, 2)
    module = export_module(model, (x,), {}, way="eager")
    results = []
    for one in (model, module, pickle.loads(pickle.dumps(module))):
        torch.manual_seed(0)
        results.append(one(x))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
