"""Models whose calls depend on the calls before."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm

import partita
from partita.capture import capture
from partita.capture.proving.kept_state import attributes_set
from partita.capture.proving.samples import Sample
from partita.errors import CaptureError
from partita.pipelining import Schedule1F1B, UncutReference, pipeline
from partita.pipelining.training import verify_step
from partita.runtime import Comm, InProcessWorld
from partita.verification.observing.copying import copy_module


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.last, self.log = 0, torch.zeros(()), [torch.zeros(())]
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.changed(self.a(x)))

    def changed(self, h: Tensor) -> Tensor:
        return h


class Counts(Layers):
    def changed(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class WarmsUp(Layers):
    def changed(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return h * min(1.0, 0.5 + self.calls / 8)


class Remembers(Layers):
    def changed(self, h: Tensor) -> Tensor:
        h = h + self.last
        self.last = h.detach().mean()
        return h


class Logs(Layers):
    def changed(self, h: Tensor) -> Tensor:
        self.log.append(h.detach().mean())
        return h + self.log[-2]


class FirstCallSetsUp(Layers):
    def changed(self, h: Tensor) -> Tensor:
        if not self.ready:
            self.last, self.ready = h.detach().std(), True
        return h / self.last


class CountsInPlace(Layers):
    def changed(self, h: Tensor) -> Tensor:
        self.last.add_(1)
        return h * self.last


class CountsInBuffer(CountsInPlace):
    def __init__(self) -> None:
        super().__init__()
        del self.last
        self.register_buffer("last", torch.zeros(()))


class Shows(Layers):
    """What it sets is for its user to look at."""

    def changed(self, h: Tensor) -> Tensor:
        self.last, self.calls = h.detach().mean(), self.calls + 1
        return h


class Table(Layers):
    """Computed once, and found there from then on."""

    def changed(self, h: Tensor) -> Tensor:
        if not self.ready:
            self.last, self.ready = torch.arange(4.0).cos(), True
        return h * self.last


def x(seed: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counts, "calls"),
        (WarmsUp, "calls"),
        (Remembers, "last"),
        (Logs, "log"),
        (FirstCallSetsUp, "last"),
    ],
)
def test_a_model_that_keeps_what_no_graph_keeps_is_refused_by_name(kind: type[Layers], name: str) -> None:
    model = kind()
    before = dict(vars(model)), list(model.log)
    text = f"keeps something for its next call in '{name}'.*the second of two calls differs.*register_buffer"
    with pytest.raises(CaptureError, match=text) as refusal:
        pipeline(model, (x(),), stages=2)
    assert (dict(vars(model)), model.log) == before
    assert 'frontend="modules"' in str(refusal.value)


class ReadInEvaluation(Layers):
    """Training measures what evaluation divides by."""

    def changed(self, h: Tensor) -> Tensor:
        if not self.training:
            return h / (1 + self.last)
        self.last = h.detach().abs().mean()
        return h


@pytest.mark.parametrize("training", [True, False])
def test_what_one_mode_keeps_for_the_other_leaves_the_mode_that_the_model_is_in(training: bool) -> None:
    model = ReadInEvaluation().train(training)
    captured = capture(model, (x(),), prove=True)
    assert not captured.both_modes
    assert captured.other is None
    assert torch.equal(captured.module(x(1)), model(x(1)))
    text = "keeps something for its next call in 'last'.*a call after one in the other mode differs"
    assert re.search(text, captured.reason, re.DOTALL)
    with pytest.raises(CaptureError, match="keeps something for its next call in 'last'"):
        captured.module.train(not training)(x(1))


@pytest.mark.parametrize("kind", [Counts, WarmsUp, Remembers, Logs])
def test_cut_at_its_blocks_it_keeps_everything(kind: type[Layers]) -> None:
    model = kind()
    pipe = pipeline(copy.deepcopy(model), (x()[:4],), stages=2, frontend="modules")

    def train(comm: Comm) -> None:
        schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 2, nn.MSELoss())
        reference = UncutReference(copy.deepcopy(model), 2, nn.MSELoss())
        for step in range(2):
            verify_step(schedule, reference, x(step), target=x(9))

    InProcessWorld(2).run(train)


@pytest.mark.parametrize("kind", [CountsInPlace, CountsInBuffer, Shows, Table])
def test_calls_in_a_row_are_the_models(kind: type[Layers]) -> None:
    model = kind()
    last = model.last
    pipe = pipeline(copy.deepcopy(model), (x(),), stages=2)
    assert pipe.proof.holds
    capture(model, (x(),), prove=True)
    assert model.last is last
    assert not last
    for seed in range(3):
        assert torch.equal(pipe(x(seed)), model(x(seed)))


def test_what_only_training_keeps_leaves_evaluation() -> None:
    model = WarmsUp().eval()
    captured = capture(model, (x(),), prove=True)
    assert not captured.both_modes
    assert torch.equal(captured.module(x(1)), model(x(1)))
    assert "'calls'" in captured.reason


def test_what_forward_sets_and_no_call_reads_is_said_and_left_out_of_the_comparison() -> None:
    pipe = pipeline(Shows(), (x(),), stages=2)
    assert pipe.unkept == ("last", "calls")
    assert "without 'last', 'calls', which forward sets: two calls in a row did not differ" in str(
        pipe.info()
    )
    result = partita.verify(pipe, Shows(), (x(),), backward=False)
    assert [one.where for one in result.differences if one.kind == "attribute"] == []
    model = Shows()
    result = partita.verify(pipeline(model, (x(),), stages=2), model, (x(),)).check()
    assert result.left_out == ("attribute last", "attribute calls")
    assert "not kept by the candidate, as it says: attribute last, attribute calls" in str(result)
    graph = capture(model, (x(),)).module  # which says nothing
    assert not partita.verify(graph, model, (x(),)).ok


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("normed", [weight_norm, spectral_norm])
def test_a_weight_that_a_hook_computes_anew_in_each_call(normed: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(normed(nn.Linear(4, 4)), nn.Tanh(), normed(nn.Linear(4, 4)))
    pipe = pipeline(model, (x(),), stages=2)
    assert pipe.proof.holds
    assert not pipe.proof.without_gradients
    partita.verify(pipe, model, (x(1),)).check()
    with torch.no_grad():
        assert torch.equal(pipe.eval()(x(1)), model.eval()(x(1)))
    pipe.train()
    model.train()
    reference = copy_module(model)
    for seed in range(2):
        assert torch.equal(pipe(x(seed)), reference(x(seed)))


def test_data_that_forward_replaces_are_refused_and_written_data_are_taken() -> None:
    class Replaces(Layers):
        def changed(self, h: Tensor) -> Tensor:
            self.b.bias.data = self.b.bias.data * 0.5
            return h

    class Writes(Layers):
        def changed(self, h: Tensor) -> Tensor:
            with torch.no_grad():
                self.b.bias.copy_(self.b.bias * 0.5)
            return h

    with pytest.raises(
        CaptureError, match=re.escape("write into it (with torch.no_grad(): weight.copy_(...))")
    ):
        capture(Replaces(), (x(),))
    model = Writes()
    graph = capture(copy.deepcopy(model), (x(),), prove=True).module
    for seed in range(2):
        assert torch.equal(graph(x(seed)), model(x(seed)))


def test_attributes_that_a_call_sets_are_named_and_put_back() -> None:
    model = nn.Sequential(Logs(), Counts(), Layers())
    sample = Sample("the example", (x(),), {})
    assert attributes_set(model, sample) == ["0.log", "1.calls"]
    assert attributes_set(model, sample) == ["0.log", "1.calls"]
    assert (len(model[0].log), model[1].calls) == (1, 0)
