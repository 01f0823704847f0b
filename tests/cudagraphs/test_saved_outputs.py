"""What forward saves for backward is not copied, and never overwritten while somebody has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import Net, assert_same_state, batch, capturing
from torch import nn

from partita._torch.tensors.copy_many import copy_many
from partita.cudagraphs import CudaGraphModule, CudaGraphsBackend, ReplayRecorder
from partita.cudagraphs.replaying import outputs


class Ledger:
    """Counts the bytes that regions copy out, and those that they hand out in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = {"copy_many": 0, "_in_place": 0}
        monkeypatch.setattr(outputs, "_in_place", self._counted("_in_place", outputs._in_place))
        monkeypatch.setattr(outputs, "copy_many", self._copied)

    def _copied(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.bytes["copy_many"] += sum(source.nbytes for source in sources)
        copy_many(targets, sources)

    def _counted(self, name: str, plan: Any) -> Any:
        def planned(result: torch.Tensor, *rest: Any) -> Any:
            take = plan(result, *rest)

            def output(*args: Any) -> Any:
                self.bytes[name] += result.nbytes
                return take(*args)

            return output

        return planned


def steps(runner: Any, model: nn.Module, count: int, *, at_once: int = 1) -> None:
    """Training steps; ``at_once`` forwards come before their backwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(count):
        torch.manual_seed(step)
        losses = [runner(*batch(10 * step + number)).square().mean() for number in range(at_once)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def pair(**options: Any) -> tuple[nn.Module, nn.Module, CudaGraphsBackend]:
    torch.manual_seed(0)
    reference = Net()
    return copy.deepcopy(reference), reference, capturing(**options)


def overtaken(backend: CudaGraphsBackend) -> int:
    return sum(info.overtaken for graph in backend.graphs for info in graph.cache_info().values())


def test_saved_activations_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(monkeypatch)
    model, reference, backend = pair()
    steps(torch.compile(model, backend=backend), model, 5)
    steps(reference, reference, 5)
    assert_same_state(model, reference)
    assert overtaken(backend) == 0
    saved = {name for graph in backend.graphs for name in graph.plan.saved}
    assert saved
    # what is copied out is the result, the statistics and the gradients
    assert ledger.bytes["_in_place"] > ledger.bytes["copy_many"] / 2


def test_backward_reads_what_was_saved_where_it_lies() -> None:
    buffers = []

    class Counting(ReplayRecorder):
        def buffer(self, like: torch.Tensor) -> torch.Tensor:
            buffers.append(tuple(like.shape))
            return super().buffer(like)

    recorder = Counting()
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
    compiled = torch.compile(model, backend=capturing(recorder=lambda _device: recorder))
    for _ in range(4):
        compiled(torch.ones(2, 3)).square().sum().backward()
    # one recording each: x in forward; x and the gradient of the result in backward; tanh's result in neither
    assert recorder.recorded == 2
    assert sorted(buffers) == [(2, 3), (2, 3), (2, 5)]


@pytest.mark.parametrize("at_once", [2, 3])
def test_forwards_before_their_backwards_overwrite_nothing(at_once: int) -> None:
    """Memory that was handed out would hold the activations of the last microbatch."""
    model, reference, backend = pair()
    steps(torch.compile(model, backend=backend), model, 6, at_once=at_once)
    steps(reference, reference, 6, at_once=at_once)
    assert_same_state(model, reference)
    assert overtaken(backend) == 0
    for graph in backend.graphs:
        for info in graph.cache_info().values():
            assert (info.recorded, info.evicted) == (at_once, 0)


def test_more_forwards_at_once_than_recordings_are_copied() -> None:
    model, reference, backend = pair(max_recordings=2)
    steps(torch.compile(model, backend=backend), model, 6, at_once=4)
    steps(reference, reference, 6, at_once=4)
    assert_same_state(model, reference)
    forward = next(graph for graph in backend.graphs if graph.kind == "forward")
    for info in forward.cache_info().values():
        assert info.overtaken > 0
        assert info.hits > info.overtaken, info
    assert forward.regions[0].cache_info().size == 1, "what was recorded for the others is gone"


def test_a_graph_that_is_kept_keeps_what_it_saved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
    compiled = torch.compile(model, backend=capturing())
    x = torch.randn(2, 3)
    losses = [compiled(x * scale).square().sum() for scale in (1, 2, 3, 4, 5)]
    for number, loss in enumerate(losses):
        actual = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        expected = torch.autograd.grad(model(x * (number + 1)).square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_view_of_what_was_lent_counts_as_having_it() -> None:
    region = CudaGraphModule(
        torch.fx.symbolic_trace(lambda x: x + 1), recorder=ReplayRecorder(), saved_outputs=[0]
    )
    with torch.no_grad():
        for number in range(3):
            part = region(torch.full((4,), float(number)))[1:2]
            if number < 2:
                del part
        assert part.tolist() == [3.0]
        later = region(torch.zeros(4))
    assert part.tolist() == [3.0]
    assert later.tolist() == [1.0] * 4
    assert (region.cache_info().overtaken, region.cache_info().recorded) == (0, 2)


def test_what_was_lent_outlives_the_region() -> None:
    region = CudaGraphModule(
        torch.fx.symbolic_trace(lambda x: x + 1), recorder=ReplayRecorder(), saved_outputs=[0]
    )
    with torch.no_grad():
        for _ in range(2):
            result = region(torch.zeros(1000))
    region.clear()
    del region
    torch.full((1000,), 7.0)
    assert result.unique().tolist() == [1.0]


def test_a_region_that_is_called_on_what_it_has_returned_is_replayed() -> None:
    """Each result lay at another place than the one before: it was recorded until it gave up."""
    region = CudaGraphModule(
        torch.fx.symbolic_trace(lambda x: x + 1),
        recorder=ReplayRecorder(),
        saved_outputs=[0],
        max_recordings=3,
    )
    value = torch.zeros(4)
    with torch.no_grad():
        for _ in range(20):
            value = region(value)
    assert value.tolist() == [20.0] * 4
    info = region.cache_info()
    assert not info.gave_up
    assert info.hits > 10
