"""Weights of the microbatches' losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.pipelining.models import TRANSFORMER, Case
from tests.pipelining.running import assert_equal, cut
from torch import Tensor
from torch.nn import functional

from partita.errors import MicrobatchError
from partita.pipelining import Schedule1F1B, UncutReference, keyed_graph
from partita.pipelining.training import LossWeights
from partita.runtime import Comm, InProcessWorld

PADDING = -100


def _masked_mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


CASE = Case("padded", TRANSFORMER.make, TRANSFORMER.after, TRANSFORMER.batch, _masked_mean)


def _padded_batch() -> tuple[Tensor, Tensor, list[int]]:
    (tokens,), _, target = CASE.data(8)
    for row, kept in enumerate((6, 6, 1, 2, 3, 1, 5, 6)):
        target[row, kept:] = PADDING
    counts = [int((part != PADDING).sum()) for part in target.split(2)]
    return tokens, target, counts


def _gradients(loss_weights: Any) -> dict[str, Tensor]:
    pipe = cut(CASE, 2)
    tokens, target, _ = _padded_batch()

    def body(comm: Comm) -> dict[str, Tensor]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        stage.module.eval()
        schedule = Schedule1F1B(stage, 4, CASE.loss)
        schedule.step(tokens, target=target, loss_weights=loss_weights)
        named = stage.module.named_parameters(remove_duplicate=False)
        return {name: value.grad for name, value in named}

    first, last = InProcessWorld(2).run(body)
    return last | first


def test_weights_in_proportion_to_the_tokens_give_the_gradient_of_the_mean_over_all_tokens() -> None:
    tokens, target, counts = _padded_batch()
    model = CASE.model().eval()
    _masked_mean(model(tokens), target).backward()
    whole = {name: value.grad for name, value in model.named_parameters()}
    weighted = _gradients(LossWeights.proportional(counts))
    for name, gradient in whole.items():
        torch.testing.assert_close(weighted[name], gradient)
    unweighted = _gradients(None)
    assert not torch.allclose(unweighted["blocks.0.mix.weight"], whole["blocks.0.mix.weight"])


def test_weighted_gradients_are_those_of_the_uncut_model_with_the_same_weights() -> None:
    tokens, target, counts = _padded_batch()
    weights = LossWeights.proportional(counts)
    whole = keyed_graph(CASE.model(), (tokens[:2],)).eval()
    UncutReference(whole, 4, CASE.loss).step(tokens, target=target, loss_weights=weights)
    gradients = _gradients(weights)
    assert_equal(gradients, {name: whole.get_parameter(name).grad for name in gradients})


def test_a_sequence_that_sums_to_1_will_do() -> None:
    assert_equal(_gradients([0.5, 0.25, 0.125, 0.125]), _gradients(LossWeights((0.5, 0.25, 0.125, 0.125))))


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ([0.5, 0.5, 0.5, 0.5], r"loss_weights sum to 2, not to 1: use LossWeights.proportional\(counts\)"),
        ([0.5, 0.5], "loss_weights has 2 values for 4 microbatches: give one for each"),
        ([2.0, -1.0, 0.0, 0.0], "loss_weights has -1.0 for microbatch 1: give finite numbers"),
        ([float("nan"), 1.0, 0.0, 0.0], "loss_weights has nan for microbatch 0"),
    ],
    ids=["sum", "length", "negative", "nan"],
)
def test_weights_that_can_not_be_meant_are_refused(weights: list[float], text: str) -> None:
    with pytest.raises(MicrobatchError, match=text):
        _gradients(weights)


def test_the_sum_is_what_the_user_says() -> None:
    assert LossWeights((1.0, 2.0), total=3.0).values == (1.0, 2.0)
    assert LossWeights((1.0, 2.0), total=None).total is None
    with pytest.raises(MicrobatchError, match="sum to 3, not to 4"):
        LossWeights((1.0, 2.0), total=4.0)


def test_a_batch_without_anything_to_average_is_refused() -> None:
    with pytest.raises(MicrobatchError, match=r"the counts \[0, 0\] sum to 0: a mean needs at least one"):
        LossWeights.proportional([0, 0])
