"""Models whose evaluation is another one under ``torch.no_grad()``."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.capture.fast_path import TOKENS, Encoder, Preference
from torch import Tensor, nn

from partita.capture import capture
from partita.errors import CaptureError, NotProven
from partita.pipelining import ScheduleGPipe, pipeline
from partita.runtime import Comm, InProcessWorld

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors")  # torch's fast path warns of them, once


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).mean(1)
        return self.head(hidden if torch.is_grad_enabled() else 2 * hidden)


class Derives(Asks):
    """Does not run without gradients."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).mean(1)
        (slope,) = torch.autograd.grad(hidden.square().sum(), hidden, create_graph=True)
        return self.head(slope)


@pytest.mark.parametrize(
    ("model", "cause"),
    [(Encoder(masked=True), "fast path for attention"), (Asks(), 'frontend="modules"')],
    ids=["encoder", "asks"],
)
def test_a_graph_that_differs_without_gradients_refuses_to_run_without(model: nn.Module, cause: str) -> None:
    text = f"under torch.no_grad.* computes something else in evaluation .*{cause}"
    with pytest.warns(NotProven, match=text):
        pipe = pipeline(model, (TOKENS,), stages=2)
    assert pipe.proof.holds
    model.eval()
    assert torch.equal(pipe.eval()(TOKENS), model(TOKENS))
    with torch.no_grad(), pytest.raises(CaptureError, match=text):
        pipe(TOKENS)
    with torch.inference_mode(), pytest.raises(CaptureError, match=text):
        pipe(TOKENS)
    pipe.train()
    assert torch.equal(pipe(TOKENS), model.train()(TOKENS))
    with torch.no_grad():
        if isinstance(model, Encoder):  # torch takes its fast path in evaluation only
            assert torch.equal(pipe(TOKENS), model(TOKENS))
        else:
            with pytest.raises(CaptureError, match=text):
                pipe(TOKENS)


def test_without_the_fast_path_it_is_the_model_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    model = Encoder(masked=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = pipeline(model, (TOKENS,), stages=2)
    model.eval()

    def evaluate(comm: Comm) -> Tensor:
        stage = pipe.build_stage(comm.rank, comm=comm)
        stage.module.eval()
        return ScheduleGPipe(stage, 2).eval(TOKENS)

    with torch.no_grad():
        assert torch.equal(InProcessWorld(2).run(evaluate)[1], model(TOKENS))


def test_a_difference_by_rounding_is_said() -> None:
    model = Encoder(masked=False)
    with pytest.warns(NotProven, match="under torch.no_grad.*fast path for attention"):
        pipe = pipeline(model, (TOKENS,), stages=2)
    assert "; but under torch.no_grad()" in str(pipe.proof)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(TOKENS), model.eval()(TOKENS))
    assert capture(model, (TOKENS,), prove="close").proof.without_gradients == ""


def test_other_models_have_nothing_to_say() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    assert capture(model, (TOKENS,), prove=True).proof.without_gradients == ""


def test_a_model_that_needs_gradients_is_not_asked_to_do_without() -> None:
    captured = capture(Derives(), (TOKENS,), prove=True)
    assert captured.proof.without_gradients == ""


@pytest.mark.dear
def test_a_fast_path_that_may_be_in_the_graph_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward itself switches gradients off, so the graph has what torch took when it was traced."""
    x = torch.randn(2, 5, 8)
    with pytest.warns(NotProven, match=r"it may be torch's fast path .* before the cut"):
        pipeline(Preference(), (x,), stages=2)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipeline(Preference(), (x,), stages=2).proof.holds
