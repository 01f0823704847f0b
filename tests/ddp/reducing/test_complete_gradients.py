"""Offers are trusted where autograd has made nothing else of them."""

from __future__ import annotations

import torch
from torch import nn

from partita.ddp.reducing.complete_gradients import CompleteGradients, can_be_added


def test_an_offer_that_is_the_whole_gradient_is_trusted() -> None:
    trust = CompleteGradients(2, late=())
    assert not trust[0]
    trust.note_offer(0, torch.ones(2))
    trust.compare(0, torch.ones(2), foreseen=True)
    assert trust[0]
    assert not trust[1]


def test_several_offers_are_compared_by_their_sum() -> None:
    trust = CompleteGradients(1, late=())
    trust.note_offer(0, torch.ones(2))
    trust.note_offer(0, torch.ones(2))
    trust.compare(0, torch.full((2,), 2.0), foreseen=True)
    assert trust[0]


def test_offers_that_nobody_knew_of_are_not_trusted() -> None:
    trust = CompleteGradients(1, late=())
    for foreseen in (True, False):
        trust.note_offer(0, torch.ones(2))
        trust.compare(0, torch.ones(2), foreseen=foreseen)
    assert not trust[0]


def test_a_gradient_with_another_part_ends_the_trust() -> None:
    trust = CompleteGradients(1, late=())
    for gradient in (torch.ones(2), torch.full((2,), 3.0)):
        trust.note_offer(0, torch.ones(2))
        trust.compare(0, gradient, foreseen=True)
    assert not trust[0]


def test_a_parameter_that_is_announced_as_late_is_never_trusted() -> None:
    trust = CompleteGradients(1, late=[0])
    trust.note_offer(0, torch.ones(2))
    trust.compare(0, torch.ones(2), foreseen=True)
    assert not trust[0]


def test_offers_of_one_pass_are_not_compared_in_the_next() -> None:
    trust = CompleteGradients(1, late=())
    trust.note_offer(0, torch.ones(2))
    trust.pass_ends()
    trust.compare(0, torch.ones(2), foreseen=True)
    assert not trust[0]


def test_only_plain_gradients_of_the_parameters_kind_can_be_added() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        assert can_be_added(None, parameter)
        assert can_be_added(torch.zeros(2), parameter)
        assert not can_be_added(torch.zeros(3), parameter)
        assert not can_be_added(torch.zeros(2, dtype=torch.float64), parameter)
        assert not can_be_added(torch.zeros(2).to_sparse(), parameter)
        parameter.grad = torch.zeros(2).to_sparse()
        assert not can_be_added(torch.zeros(2), parameter)
    assert not can_be_added(
        torch.zeros(2), nn.Parameter(torch.zeros(2))
    )  # the gradient is differentiated too
