"""One backward graph, run as a whole, in halves, and without some of its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita._torch.autograd.compiled_node import ask, mark, second_half
from partita._torch.compile.aot import AotGraph, Boxed, compile_ahead, takes_a_list
from partita._torch.compile.aot import boxed as boxed_graph
from partita.pipelining.compiled.backward_runner import BackwardRunner


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return h.relu(), self.second(h)


class Checked(nn.Module):
    """A factorisation checks what it has computed: AOTAutograd keeps such effects in order by a token, which
    it puts before the inputs of the forward graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        h = self.first(x)
        return (torch.linalg.cholesky(h @ h.mT + torch.eye(3)),)


def _compiled(model: nn.Module, compiled: list[int], *, by_operator: bool = False) -> Any:
    def piece(graph: AotGraph) -> Boxed:
        compiled.append(len(graph.gm.graph.nodes))
        return boxed_graph(graph.gm.forward)

    def compile_graph(graph: AotGraph) -> Any:
        if graph.kind != "backward":
            return graph.gm.forward
        return takes_a_list(BackwardRunner(graph, piece, fuses=False))

    def backend(gm: Any, inputs: Sequence[Any]) -> Any:
        return compile_ahead(gm, inputs, compile_graph, by_operator=by_operator)

    return torch.compile(model, backend=backend, fullgraph=True)


def _gradients(model: nn.Module, x: Tensor, outputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Those of a loss whose gradients of the outputs are dense."""
    inputs = [x, *model.parameters()]
    return list(torch.autograd.grad(_loss(outputs), inputs, allow_unused=True))


def _loss(outputs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(outputs)).square().sum()


def test_what_has_no_gradient_in_eager_mode_has_none_here() -> None:
    model, x = TwoOutputs(), torch.randn(3, 4, requires_grad=True)
    compiled: list[int] = []
    run = _compiled(model, compiled)
    for chosen in ([0], [1], [0, 1], [0]):
        uncompiled = model(x)
        expected = _gradients(model, x, [uncompiled[number] for number in chosen])
        outputs = run(x)
        mark(outputs)
        actual = _gradients(model, x, [outputs[number] for number in chosen])
        for one, other in zip(actual, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    assert len(compiled) == 3  # one for each set of outputs


def test_hooks_of_parameters_without_a_gradient_are_not_called() -> None:
    """They were called with None."""
    model, x = TwoOutputs(), torch.randn(3, 4)
    shown: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: shown.append(name) or 2 * gradient)
    outputs = _compiled(model, [])(x)
    mark(outputs)
    outputs[0].sum().backward()
    assert sorted(shown) == ["first.bias", "first.weight"]


@pytest.mark.parametrize("make", [TwoOutputs, Checked])
def test_the_halves_are_compiled_when_they_are_asked_for_and_compute_the_same(
    make: Callable[[], nn.Module],
) -> None:
    model, x = make(), torch.randn(3, 4, requires_grad=True)
    compiled: list[int] = []
    run = _compiled(model, compiled)
    expected = _gradients(model, x, model(x))
    outputs = run(x)
    mark(outputs)
    node = outputs[0].grad_fn
    leaves = [getattr(child, "variable", None) for child, _ in node.next_functions]
    edge = next(number for number, leaf in enumerate(leaves) if leaf is x)
    assert not compiled
    ask(node, frozenset({edge}))
    (gradient,) = torch.autograd.grad(_loss(outputs), [x])
    assert len(compiled) == 2
    assert torch.equal(gradient, expected[0])  # type: ignore[arg-type]
    late = {id(where.node.variable): value for where, value in second_half(node)}  # type: ignore[attr-defined]
    for parameter, wanted in zip(model.parameters(), expected[1:], strict=True):
        assert torch.equal(late[id(parameter)], wanted)  # type: ignore[arg-type]


class Viewed(nn.Module):
    """The gradients of both parameters, and of the input, are views of the result's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((x + self.first).view(4, 4) + self.second).view(2, 8)


def test_gradients_that_lie_in_one_memory_are_added_up_apart() -> None:
    """Autograd keeps each as ``.grad`` and adds the next one in place; ``torch.compile`` alone is wrong."""
    torch.manual_seed(0)
    model = Viewed()
    reference = copy.deepcopy(model)
    compiled = _compiled(model, [])
    sent = []
    for _ in range(3):
        x = torch.randn(2, 8, requires_grad=True)
        gradient = torch.randn(2, 8)
        compiled(x).backward(gradient.clone())
        reference(x.detach()).backward(gradient.clone())
        sent.append((x.grad, gradient))
    assert torch.equal(model.first.grad, reference.first.grad)
    assert torch.equal(model.second.grad, reference.second.grad)
    assert all(torch.equal(*pair) for pair in sent)


class Flattened(nn.Module):
    """The gradient of the input is a view of that of the result, where that lies in plain order."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).view(4, 4)


def test_a_gradient_that_lies_in_one_memory_in_one_layout_and_not_in_another_is_kept_apart_in_both() -> None:
    compiled = _compiled(Flattened(), [], by_operator=True)
    for gradient in (torch.randn(4, 4).t(), torch.randn(4, 4)):
        x = torch.randn(2, 8, requires_grad=True)
        sent = gradient.clone()
        compiled(x).backward(gradient)
        assert torch.equal(x.grad, sent.reshape(2, 8))
        x.grad.zero_()
        assert torch.equal(gradient, sent)
