"""Parameters that are converted after the cut."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.dtype_reading_norm import DtypeReadingNorm
from torch import nn

from partita import verify
from partita.errors import SignatureMismatch
from partita.pipelining import SplitPoint, pipeline


def _model(last: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), last)


TOKENS = torch.randint(0, 9, (2, 3))


@pytest.mark.parametrize("of_model", [False, True])
def test_a_graph_that_has_dtypes_of_the_cut_is_refused_with_other_ones(of_model: bool) -> None:
    """It returned float32 where the model returns bfloat16, and rounded otherwise, without a word."""
    model = _model(DtypeReadingNorm())
    pipe = pipeline(model, (TOKENS,), split_spec={"1": SplitPoint.BEGINNING})
    other = copy.deepcopy(pipe).to(torch.bfloat16)
    (model if of_model else pipe).to(torch.bfloat16)
    for one in (pipe, other):
        with pytest.raises(
            SignatureMismatch, match=r"'0.weight' is bfloat16, and was float32 .*'to' of 2 has"
        ):
            one(TOKENS)
    assert pipe.float()(TOKENS).dtype is torch.float32


def test_the_ways_out_of_it_hold() -> None:
    model = _model(DtypeReadingNorm())
    own_code = pipeline(model, (TOKENS,), split_spec={"1": SplitPoint.BEGINNING}, frontend="modules")
    own_code.to(torch.bfloat16)
    verify(own_code, model, (TOKENS,)).check()
    again = pipeline(model, (TOKENS,), split_spec={"1": SplitPoint.BEGINNING})
    verify(again, model, (TOKENS,)).check()
    assert again(TOKENS).dtype is torch.bfloat16


def test_a_graph_without_dtypes_follows_its_parameters() -> None:
    model = _model(nn.GELU())
    pipe = pipeline(model, (TOKENS,), split_spec={"1": SplitPoint.BEGINNING}).to(torch.float64)
    assert torch.equal(pipe(TOKENS), model(TOKENS))
    assert pipe(TOKENS).dtype is torch.float64
