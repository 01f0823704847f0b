from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from partita._torch.tensors import free_memory
from partita.capture import capture
from partita.capture.proving.proof import CLOSE, Disproof, proven, tolerance_of
from partita.errors import CaptureError, NotProven
from partita.pipelining import SplitPoint, pipeline
from partita.verification.comparing.compare import EXACT, Tolerance

POINTS = {"a": SplitPoint.END}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        h = self.drop(self.norm(self.a(x)))
        return {"h": self.b(h if mask is None else h * mask)}


class Unlike(nn.Module):
    """Takes another way wherever tensors are traced, and nobody can tell it otherwise."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.a, self.b, self.by = nn.Linear(4, 4), nn.Linear(4, 4), by

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if type(h).__name__ == "FakeTensor" or torch.compiler.is_dynamo_compiling():
            h = h + self.by
        return self.b(h)


class KeepsOnlyGradients(nn.Module):
    """The same values when it is traced, with another gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if type(h).__name__ == "FakeTensor" or torch.compiler.is_dynamo_compiling():
            h = h.detach() + (h - h.detach()) * 2
        return self.b(h)


def x(rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def test_a_proven_capture_says_what_it_was_compared_on() -> None:
    proof = capture(Model(), (x(), torch.ones(3, 4)), prove=True).proof
    assert proof.holds
    assert str(proof) == (
        "proven: equal to the eager model bit for bit in training and evaluation on the example, a sample "
        "with other values and padding, and one more in the batch, a sample with a mask that hides nothing"
    ), str(proof)


def test_the_model_is_as_it_was_after_a_proof() -> None:
    model = Model().eval()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    capture(model, (x(),), prove=True)
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0]
        assert torch.equal(value, before[name][1])
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "where"),
    [(Unlike(), "output: 12 of 12 elements differ"), (KeepsOnlyGradients(), "gradient of a.weight")],
    ids=["values", "gradients"],
)
def test_a_graph_that_is_not_the_model_is_refused_with_value_node_and_line(
    model: nn.Module, where: str
) -> None:
    # without the proof it was taken without a word
    assert pipeline(model, (x(),), split_spec=POINTS, prove=False).num_stages == 2
    with pytest.raises(CaptureError) as caught:
        pipeline(model, (x(),), split_spec=POINTS)
    text = str(caught.value)
    assert "the graph that it traces is not the model: on the example: " in text
    assert where in text
    assert "from node '" in text
    assert "test_proof.py" in text
    assert 'prove="close"' in text


def test_a_stated_tolerance_is_accepted() -> None:
    small = Unlike(1e-7)
    for prove in ("close", Tolerance(rtol=1e-3, atol=1e-4)):
        pipe = pipeline(small, (x(),), split_spec=POINTS, prove=prove)
        assert pipe.proof.holds
        assert "within rtol=" in str(pipe.proof)
        assert str(pipe.proof) in str(pipe.info())
    with pytest.raises(CaptureError, match="is not the model"):
        pipeline(Unlike(0.1), (x(),), split_spec=POINTS, prove="close")


def test_prove_takes_four_kinds_of_values() -> None:
    assert tolerance_of(True) == EXACT
    assert tolerance_of("close") == CLOSE
    assert tolerance_of(False) is None
    odd: Any = "exactly"
    with pytest.raises(ValueError, match=r"prove is 'exactly': give True \(bit for bit\)"):
        tolerance_of(odd)


def test_a_model_without_data_is_cut_with_one_warning() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.warns(NotProven, match="Model is cut, but not proven: .*on the meta device") as caught:
        pipe = pipeline(model, (torch.empty(3, 4, device="meta"),), split_spec=POINTS)
    assert len([one for one in caught if one.category is NotProven]) == 1
    assert not pipe.proof.holds
    assert "not proven: " in str(pipe.info())
    assert not pipe.info().proof.holds


def test_what_does_not_fit_into_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda _device: 100)
    proof = capture(Model(), (x(),), prove=True).proof
    assert not proof.holds
    assert "MiB are free" in proof.text


class Uncopyable(Model):
    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = iter([1])

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise RuntimeError("no copies")


def test_a_model_that_can_not_be_copied_is_not_proven() -> None:
    proof = capture(Uncopyable(), (x(),), prove=True).proof
    assert not proof.holds
    assert "no copies" in proof.text


_COUNT = [0]


def _counted() -> int:
    _COUNT[0] += 1
    return _COUNT[0]


def test_a_model_whose_own_runs_differ_is_not_proven() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + _counted()

    proof = capture(Counts(), (x(),), prove=True).proof
    assert not proof.holds
    assert "two runs of the model itself differ" in proof.text


def test_a_number_that_was_read_from_a_weight_is_noticed() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    graph = capture(model, (x(),)).module
    graph.constant = model.bias.clone()
    for node in graph.graph.find_nodes(op="get_attr", target="bias"):
        node.target = "constant"  # as if the trace had taken it for one
    graph.recompile()
    assert torch.equal(graph(x()), model(x()))
    with pytest.raises(Disproof, match=r"on a sample with other values.*output"):
        proven(model, {True: graph}, (x(),), {}, EXACT)


def test_a_sample_that_the_model_does_not_take_proves_nothing_against_it() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, ids: Tensor, place: Tensor) -> Tensor:
            return self.table(ids + place)  # only some pairs are in the table

    proof = capture(Small(), (torch.tensor([[0, 9]]), torch.tensor([[9, 0]])), prove=True).proof
    assert proof.holds
    assert "the example" in proof.text


def test_one_tensor_in_two_places_is_two_inputs() -> None:
    # export took the two for one, and the graph read the second where the model reads the first
    class Pairs(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 - b

    same = x()
    captured = capture(Pairs(), (same, same), prove=True)
    assert captured.proof.holds
    assert torch.equal(captured.module(x(3), x(3) + 1), x(3) * 2 - (x(3) + 1))


class Wrapped(nn.Module):
    """A frozen weight that wraps others, as a quantised one does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() @ self.weight.a)  # type: ignore[no-any-return, operator]


def test_weights_that_wrap_tensors_are_changed_by_these_and_compared_by_these() -> None:
    """Torchao's weights can't be multiplied by a number, and its error came instead of a proof."""
    captured = capture(Wrapped(), (torch.randn(2, 4),), prove=True)
    assert captured.proof.holds
