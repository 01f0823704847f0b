from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.errors import ExecutionError
from partita.pipelining.stages.backward.split_backward import input_pass
from partita.pipelining.stages.flight import Flight, detached, hand_to_caller, let_go_of_inputs, roots_of


def test_detached_keeps_the_structure() -> None:
    value = torch.ones(1, requires_grad=True)
    copy = detached({"a": [value, None, 3]})
    assert copy["a"][1:] == [None, 3]
    assert not copy["a"][0].requires_grad


def test_a_backward_pass_starts_from_the_loss_and_from_what_has_a_gradient() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    output, other, loss = leaf * 2, leaf * 3, (leaf * 4).sum()
    seed, gradient = torch.ones(()), torch.ones(2)
    flight = Flight({"leaf": leaf}, {"output": output, "other": other}, {}, False, (loss, seed))
    roots, seeds = roots_of(flight, {"output": gradient})
    assert [root is value for root, value in zip(roots, (loss, output), strict=True)] == [True, True]
    assert seeds == [seed, gradient]


def test_a_loss_without_a_trained_parameter_is_refused() -> None:
    flight = Flight({}, {}, {}, False, (torch.zeros(()), torch.ones(())))
    with pytest.raises(ExecutionError, match="the loss does not depend on any parameter that is trained"):
        roots_of(flight, {})


def test_gradients_of_two_inputs_from_one_graph_go_back_to_the_caller_together() -> None:
    start = torch.ones(2, requires_grad=True)
    squares = start.square()
    first, second = squares[:1], squares[1:]
    hand_to_caller({"a": first, "b": second, "c": start}, {"a": torch.ones(1), "b": torch.ones(1), "c": None})
    assert torch.equal(start.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_what_w_does_not_need_of_a_stages_inputs_is_free_after_i() -> None:
    """The graph that W keeps has them all: a stage that began with attention kept queries, keys and values of
    each microbatch until its W.
    """
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    values = {name: torch.randn(3, 4) for name in ("multiplied", "added", "watched")}
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    watched = leaves["watched"]
    output = second((first(leaves["multiplied"]) + leaves["added"] + watched).exp())
    flight = Flight(leaves, {"output": output}, {}, False)
    half = input_pass([output], [torch.ones(3, 4)], list(leaves.values()))
    by_name = dict(leaves)
    node = torch.autograd.graph.get_gradient_edge(by_name.pop("added")).node
    del leaves, by_name, output
    flight.outputs.clear()
    let_go_of_inputs(flight, dict(zip(values, half.gradients, strict=True)))
    assert node.variable.nbytes == 0  # type: ignore[attr-defined]
    assert torch.equal(watched, values["watched"])
    half.weights.run()
    uncut = second((first(values["multiplied"]) + values["added"] + watched).exp())
    expected = torch.autograd.grad(uncut.sum(), [first.weight, second.weight])
    assert torch.equal(first.weight.grad, expected[0])  # type: ignore[arg-type]
    assert torch.equal(second.weight.grad, expected[1])  # type: ignore[arg-type]


class ScaledByFirst(torch.autograd.Function):
    """Takes a tensor in a list, where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, others: list[Tensor]) -> Tensor:
        ctx.save_for_backward(others[0])
        return weight * others[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * gradient, None


def test_an_input_that_w_has_from_elsewhere_than_the_graph_of_i_is_kept() -> None:
    weight = torch.ones(3, requires_grad=True)
    leaves = {"x": torch.arange(3.0).requires_grad_()}
    output = ScaledByFirst.apply(weight, [leaves["x"]])
    half = input_pass([output], [torch.ones(3)], list(leaves.values()))
    let_go_of_inputs(Flight(leaves, {}, {}, False), {"x": half.gradients[0]})
    half.weights.run()
    assert torch.equal(weight.grad, torch.arange(3.0))  # type: ignore[arg-type]
