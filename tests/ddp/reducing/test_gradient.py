"""Offers are the whole gradient where autograd has made nothing else of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from partita.ddp.reducing.gradient import Arrival, ParameterGradient


def of_two(*, late: bool = False) -> ParameterGradient:
    return ParameterGradient("weight", nn.Parameter(torch.zeros(2)), late=late)


def one_pass(
    gradient: ParameterGradient, offers: Sequence[float], summed: float, *, expected: int | None = None
) -> bool:
    """Compiled graphs offer, autograd sums to ``summed``; ``expected`` is how many offers were to come."""
    arrival = Arrival(to_come=(len(offers) if expected is None else expected) - len(offers))
    for offer in offers:
        arrival.note_left(torch.full((2,), offer))
    gradient.parameter.grad = torch.full((2,), summed)
    gradient.compare(arrival)
    assert arrival.left is None
    return gradient.whole


def test_an_offer_that_is_the_whole_gradient_is_known_to_be() -> None:
    gradient = of_two()
    assert not gradient.whole
    assert one_pass(gradient, [1.0], 1.0)


def test_several_offers_are_compared_by_their_sum() -> None:
    assert one_pass(of_two(), [1.0, 1.0], 2.0)


def test_offers_that_nobody_knew_of_are_not_the_whole() -> None:
    gradient = of_two()
    assert one_pass(gradient, [1.0], 1.0)
    assert not one_pass(gradient, [1.0], 1.0, expected=0)


def test_a_gradient_with_another_part_is_not_known_any_more() -> None:
    gradient = of_two()
    assert one_pass(gradient, [1.0], 1.0)
    assert not one_pass(gradient, [1.0], 3.0)


def test_of_a_parameter_that_is_announced_as_late_offers_are_never_the_whole() -> None:
    assert not one_pass(of_two(late=True), [1.0], 1.0)


def test_a_pass_without_offers_says_nothing() -> None:
    gradient = of_two()
    assert one_pass(gradient, [1.0], 1.0)
    assert one_pass(gradient, [], 5.0)


def test_a_sparse_offer_is_not_compared() -> None:
    """Torch can't, and its own error hid the one that says what to do about sparse gradients."""
    gradient, sparse = of_two(), torch.ones(2).to_sparse()
    arrival = Arrival(to_come=0)
    arrival.note_left(sparse)
    gradient.parameter.grad = sparse
    gradient.compare(arrival)
    assert not gradient.whole


def test_what_was_taken_is_given_out_once() -> None:
    arrival = Arrival(partial=torch.ones(2))
    assert torch.equal(arrival.with_partial(torch.ones(2)), torch.full((2,), 2.0))  # type: ignore[arg-type]
    assert arrival.with_partial(None) is None


def test_only_plain_gradients_of_the_parameters_kind_can_be_taken() -> None:
    gradient = of_two()
    with torch.no_grad():
        assert gradient.can_take(None)
        assert gradient.can_take(torch.zeros(2))
        assert not gradient.can_take(torch.zeros(3))
        assert not gradient.can_take(torch.zeros(2, dtype=torch.float64))
        assert not gradient.can_take(torch.zeros(2).to_sparse())
        gradient.parameter.grad = torch.zeros(2).to_sparse()
        assert not gradient.can_take(torch.zeros(2))
    assert not of_two().can_take(torch.zeros(2))  # the gradient is differentiated too
