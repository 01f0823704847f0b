from __future__ import annotations

import pytest
import torch

from partita.errors import ExecutionError
from partita.pipelining.stages.flight import Flight, detached, hand_to_caller, roots_of


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
