"""Buckets are sent when their last gradient is there, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ddp.alone import alone
from torch import nn

from partita.ddp.buckets.bucket_set import BucketSet
from partita.ddp.buckets.settings import ReducerSettings
from partita.ddp.reducing.arrivals import GradientArrivals
from partita.ddp.reducing.consensus import Consensus
from partita.ddp.reducing.gradient import Arrival, ParameterGradient
from partita.ddp.reducing.pass_state import PassState
from partita.runtime.weight_sample import SAMPLE_FLAGS

Check = Callable[[GradientArrivals, PassState, list[nn.Parameter]], None]


def on_three(check: Check) -> None:
    """Three parameters, the last of which is the first bucket; the other two share one."""

    def body(comm: Any) -> None:
        parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 1, 2)]
        consensus = Consensus(comm, 3, check_graphs=True)
        buckets = BucketSet("abc", parameters, consensus.order, ReducerSettings(8, 8))
        assert [bucket.names for bucket in buckets.layouts] == [("c",), ("b", "a")]
        gradients = [
            ParameterGradient(name, parameter) for name, parameter in zip("abc", parameters, strict=True)
        ]
        arrivals = GradientArrivals(gradients, comm, buckets=buckets, consensus=consensus, hook=None)
        state = PassState(True, [Arrival(expected=True, early=True) for _ in gradients])
        with torch.no_grad():
            check(arrivals, state, parameters)

    alone(body)


def arrive(arrivals: GradientArrivals, state: PassState, parameters: list[nn.Parameter], index: int) -> None:
    parameters[index].grad = torch.ones_like(parameters[index])
    arrivals.accumulated(state, index)


def test_a_bucket_waits_for_its_last_gradient_and_for_the_buckets_before() -> None:
    def check(arrivals: GradientArrivals, state: PassState, parameters: list[nn.Parameter]) -> None:
        sent = []
        for index in (0, 1, 2):
            arrive(arrivals, state, parameters, index)
            sent.append(len(state.reductions))
        assert sent == [0, 0, 1]  # the last one says how the pass has ended
        assert arrivals.is_complete(state)
        arrivals.send_rest(state)
        assert len(state.reductions) == 2

    on_three(check)


def test_a_gradient_that_will_not_come_is_not_waited_for() -> None:
    def check(arrivals: GradientArrivals, state: PassState, parameters: list[nn.Parameter]) -> None:
        arrive(arrivals, state, parameters, 2)
        arrive(arrivals, state, parameters, 1)
        assert not arrivals.is_complete(state)
        arrivals.accumulated(state, 0)  # autograd had nothing to add
        assert arrivals.is_complete(state)

    on_three(check)


def test_at_the_end_all_buckets_are_sent() -> None:
    def check(arrivals: GradientArrivals, state: PassState, parameters: list[nn.Parameter]) -> None:
        arrivals.send_rest(state)
        flags = [reduction.flagged().tolist() for reduction in state.reductions]
        assert [of_pass[:3] for of_pass in flags] == [[0, 0, 0], [0, 0, 1]]
        assert [sum(of_pass[3:]) for of_pass in flags] == [0, SAMPLE_FLAGS // 2]
        arrivals.send_rest(state)
        assert len(state.reductions) == 2

    on_three(check)


def test_an_offer_is_taken_when_the_last_graph_has_made_it() -> None:
    def check(arrivals: GradientArrivals, state: PassState, parameters: list[nn.Parameter]) -> None:
        state.arrivals[2].to_come = 2
        assert arrivals.offered(state, 2, torch.ones(2)) is None
        assert not state.reductions
        assert arrivals.offered(state, 2, torch.ones(2)) is None
        state.reductions[0].wait()
        state.reductions[0].hand_back()
        assert parameters[2].grad is not None
        assert parameters[2].grad.tolist() == [2.0, 2.0]

    on_three(check)


def test_what_was_taken_goes_back_to_autograd_where_a_later_offer_can_not_be() -> None:
    def check(arrivals: GradientArrivals, state: PassState, parameters: list[nn.Parameter]) -> None:
        state.arrivals[2].to_come = 2
        arrivals.offered(state, 2, torch.ones(2))
        with torch.enable_grad():
            left = arrivals.offered(state, 2, torch.ones(2))
        assert left is not None
        assert left.tolist() == [2.0, 2.0]
        assert state.arrivals[2].partial is None

    on_three(check)


def test_without_synchronisation_gradients_stay_with_autograd() -> None:
    def check(arrivals: GradientArrivals, _state: PassState, parameters: list[nn.Parameter]) -> None:
        state = PassState(False, [Arrival() for _ in parameters])
        offer = torch.ones(2)
        assert arrivals.offered(state, 2, offer) is offer
        arrive(arrivals, state, parameters, 2)
        assert not state.reductions

    on_three(check)


@pytest.mark.parametrize("index", [0, 1])
def test_offers_that_never_became_whole_are_taken_at_the_end(index: int) -> None:
    def check(arrivals: GradientArrivals, state: PassState, parameters: list[nn.Parameter]) -> None:
        state.arrivals[index].to_come = 2
        arrivals.offered(state, index, torch.ones(1))
        arrivals.take_partial(state)
        assert state.arrivals[index].is_there

    on_three(check)
