from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.errors import CaptureError
from partita.pipelining import SplitPoint, pipe_split, pipeline


class Unused(nn.Module):
    """Asks the same in two stages; what the first way of the first computes is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        _ = h if x.sum() > 0 else h.cumsum(1)
        pipe_split()
        return self.b(h if x.sum() > 0 else h.cumsum(1))


def test_what_a_branch_computes_for_nobody_stays_in_its_stage() -> None:
    model = Unused()
    x = torch.randn(2, 4)
    pipe = pipeline(model, (x,))
    assert pipe.num_stages == 2
    for sample in (x.abs(), -x.abs()):
        assert partita.verify(pipe, model, (sample,)).ok


class WritesThroughAView(nn.Module):
    """One way writes by a view of what that way has made; both ways have the view."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        full = bool(mask.all())
        y = self.first(x)
        own = torch.zeros(mask.shape) if full else mask.float() * 2
        flat = own.view(-1)
        if self.kind == "before, in both ways":
            flat.add_(4.0)
        z = self.mid(y + flat.sum())
        if full:
            if self.kind == "by the view, then by the base":
                flat.add_(4.0)
            if self.kind == "by the view alone":
                return self.last(z + flat.add_(4.0).max())
            own.mul_(2.0)
        elif self.kind == "by the view alone":
            return self.last(z + flat.max())
        return self.last(z + own[:, :, None])


@pytest.mark.parametrize("kind", ["before, in both ways", "by the view, then by the base"])
def test_memory_of_a_way_that_a_stage_makes_and_is_sent_is_not_written(kind: str) -> None:
    """The second stage made the tensor again, without what had been written by its view: the loss was
    another one than the model's, without a word.
    """
    model, x, mask = WritesThroughAView(kind), torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(
        CaptureError, match=r"'add_' writes to the value 'view' in stage \d, and stages \[0, 1\]"
    ):
        pipeline(model, (x, mask), split_spec={"mid": SplitPoint.END})
    pipe = pipeline(model, (x, mask), split_spec={"first": SplitPoint.END})
    for sample in (mask, mask.tril()):
        partita.verify(pipe, model, (x, sample)).check()


def test_memory_of_a_way_that_is_sent_alone_may_be_written() -> None:
    model = WritesThroughAView("by the view alone")
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long)
    pipe = pipeline(model, (x, mask), split_spec={"mid": SplitPoint.END})
    for sample in (mask, mask.tril()):
        partita.verify(pipe, model, (x, sample)).check()


class WritesWhatIsChosen(nn.Module):
    """Both ways write by a view to the one of two tensors that is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        one, other = x * 1, x * 2
        sums = one.sum() + other.sum()
        chosen = one if mask.all() else other
        row = chosen[:, 0]
        z = self.first(x + row.sum() + sums)
        row.fill_(2.0)
        return self.last(z * chosen)


@pytest.mark.parametrize("full", [True, False])
def test_what_is_chosen_lies_in_the_memory_of_both(full: bool) -> None:
    """With an example of the second way it was cut, and the second stage did not see what it had written."""
    mask = torch.ones(2, 5, dtype=torch.long)
    example = (torch.randn(2, 5, 8), mask if full else mask.tril())
    with pytest.raises(CaptureError, match="'fill_' writes to the value 'select' in stage 1"):
        pipeline(WritesWhatIsChosen(), example, split_spec={"first": SplitPoint.END})
