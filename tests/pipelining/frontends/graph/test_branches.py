from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import partita
from partita.errors import CaptureError, NotCompiled
from partita.pipelining import Pipe, Schedule1F1B, SplitPoint, pipe_split, pipeline
from partita.runtime import Comm, InProcessWorld


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


class Layers(nn.Module):
    """Two layers, for models that ask about what they are given, or compute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)


class Collects(Layers):
    """What one way computes is used beside what both compute, and in the backward pass after it."""

    def forward(self, x: Tensor) -> Tensor:
        results, mean = [], x.mean()
        for layer in (self.a, self.b):
            x = layer(x)
            results.append(x)
            if mean > 0.2:
                results.append(x.relu())
        return torch.stack(results).sum(0)


class Clips(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        largest = h.abs().max()
        if largest > 1.0:
            h = h / largest
        return self.b(h)


class Detaches(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.norm() > 2:
            h = h.detach()
        return self.b(h)


class Halves(Layers):
    """Asks again in one way."""

    def forward(self, x: Tensor) -> Tensor:
        h, halved = self.a(x), 0
        while h.abs().max() > 1.0 and halved < 3:
            h, halved = h / 2, halved + 1
        return self.b(h) + halved


class Shares(Layers):
    """What one way computes is used by two stages."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, :3] > 0).any() and not (x[:, 3:] > 0).all():
            return self.a(x)
        if (x < 0).all():
            return self.b(x)
        return self.a(x) + self.b(x)


class WritesLater(Layers):
    """Asks about memory that is written afterwards: no compiler can ask before."""

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.1
        k = self.b(x) if h.sum() > 0 else x * 2
        h.mul_(2.0)
        return self.a(h) * k


class TakesApart(Layers):
    """One way has a tuple that is used on both sides of the cut; no gradient flows to one of its values."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        values, places = h.max(-1, keepdim=True) if x.mean() > 0.2 else (None, None)
        h = self.b(h if values is None else h + values)
        return h if values is None else h * values + places


class AsksUnderAutocast(Layers):
    """What it asks is true of numbers that autocast has rounded."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            h = h.float() * 3 if (h == h.bfloat16()).all() else self.b(h).float()
        return self.b(h)


class WritesToOneWays(Layers):
    """Behind the cut it writes to what one way has computed before."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        k = h * 2 if x.mean() > 0.2 else None
        h = self.b(h)
        return h if k is None else k.add_(h) * h


MODELS = [
    Collects,
    Clips,
    Detaches,
    Halves,
    Shares,
    WritesLater,
    TakesApart,
    AsksUnderAutocast,
    WritesToOneWays,
]


def _step(
    pipe: Pipe, x: Tensor, target: Tensor, backend: str | None
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The losses of a step of two ranks, and all gradients."""

    def rank(comm: Comm) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        if backend is not None:
            stage.compile(backend)
        losses: list[Tensor] = []
        Schedule1F1B(stage, 4, mse_loss).step(x, target=target, losses=losses)
        return losses, {name: value.grad for name, value in stage.module.named_parameters()}

    results = InProcessWorld(2).run(rank)
    return results[1][0], {name: grad for _, grads in results for name, grad in grads.items()}


@pytest.mark.parametrize("model_class", MODELS)
def test_each_microbatch_takes_the_way_of_the_model(model_class: type[nn.Module]) -> None:
    torch.manual_seed(3)
    model, target = model_class(), torch.randn(20, 6)
    kinds = [torch.rand(5, 6) + 0.1, -torch.rand(5, 6) - 0.1, torch.randn(5, 6) * 3, torch.randn(5, 6) * 0.1]
    uncut, expected = copy.deepcopy(model), []
    x = torch.cat(kinds)
    for sample, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        loss = mse_loss(uncut(sample), wanted)
        (loss / 4).backward()
        expected.append(loss.detach())
    for example in (kinds[0][:2], kinds[2][:2]):
        at = {WritesLater: "a", TakesApart: "b", AsksUnderAutocast: "b@1", WritesToOneWays: "b"}.get(
            model_class
        )
        where = {"stages": 2} if at is None else {"split_spec": {at: SplitPoint.BEGINNING}}
        pipe = pipeline(model, (example,), **where)
        assert all(torch.equal(pipe(sample), model(sample)) for sample in kinds)
        for backend in (None, "aot_eager"):
            with pytest.warns(NotCompiled) if _runs_uncompiled(model, backend) else nullcontext():
                losses, gradients = _step(pipe, x, target, backend)
            assert list(map(float, losses)) == list(map(float, expected))
            for name, parameter in uncut.named_parameters():
                gradient = gradients[name]
                assert gradient is not None
                assert parameter.grad is not None
                assert torch.equal(gradient, parameter.grad), name


def _runs_uncompiled(model: nn.Module, backend: str | None) -> bool:
    """Whether it runs uncompiled; torch 2.11 can't compile regions of autocast either."""
    untraced = AsksUnderAutocast if torch.__version__.startswith("2.11.") else ()
    return backend is not None and isinstance(model, (WritesLater, untraced))


class Adapts(Layers):
    """One way writes to buffers, one of which the backward pass needs as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("adapted", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.mean() < 0:
            self.scale.mul_(0.9).add_(h.detach().mean(0))
            self.scale[2:4] -= 1
            self.adapted += 1
            h = self.norm(h)
        return self.b(h * self.scale) + self.scale.sum()


class AdaptsWithin(Adapts):
    """Writes in a way within a way, and computes something else in each mode."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.mean() < 0:
            self.adapted += 1
            if x.std() > 1:
                self.scale.mul_(0.9).add_(h.detach().mean(0))
        return self.b(h * self.scale + (self.norm(h) if self.training else 1.0))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("example", [0.5, -0.5])
@pytest.mark.parametrize("kind", [Adapts, AdaptsWithin])
def test_one_way_writes_to_buffers(kind: type[Adapts], example: float, recompute: bool) -> None:
    """A graph held the way of its example only. Memory that all ways have is written once, where it lies. A
    stage that recomputed was refused: the first pass did not write what a later one does.
    """
    torch.manual_seed(3)
    model, x, target = kind(), torch.randn(20, 6), torch.randn(20, 6)
    for number, mean in enumerate((0.5, -0.5, -0.5, 0.5)):
        x[5 * number : 5 * number + 5] += mean - x[5 * number : 5 * number + 5].mean()
    uncut = copy.deepcopy(model)
    for sample, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        (mse_loss(uncut(sample), wanted) / 4).backward()
    cut = {"b": SplitPoint.BEGINNING} if kind is AdaptsWithin else {"a": SplitPoint.END}
    pipe = pipeline(model, (torch.full((2, 6), example),), split_spec=cut, recompute=recompute)
    for sample in x.chunk(4):
        partita.verify(pipe, model, (sample,), mode="train").check()
        partita.verify(pipe, model, (sample,), mode="eval").check()

    def rank(comm: Comm, backend: str | None) -> nn.Module:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        if backend is not None:
            stage.compile(backend)
        Schedule1F1B(stage, 4, mse_loss).step(x, target=target)
        return stage.module

    for backend in (None,) if recompute else (None, "aot_eager"):
        parts = InProcessWorld(2).run(rank, backend)
        gradients = {name: value.grad for part in parts for name, value in part.named_parameters()}
        buffers = {name: value for part in parts for name, value in part.named_buffers()}
        assert_equal(gradients, {name: value.grad for name, value in uncut.named_parameters()})
        assert_equal(buffers, dict(uncut.named_buffers()))


class WritesApart(Layers):
    """A stage writes to a buffer of which another one has its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.mean() < 0:
            if self.way == "view":
                self.scale[2:4].mul_(0.5)
            elif x.std() > 1:
                self.scale.mul_(0.5)
        return self.b(h) * self.scale


@pytest.mark.parametrize("way", ["view", "nested"])
@pytest.mark.parametrize("example", [0.5, -0.5])
def test_a_cut_through_what_one_way_writes_to_by_a_view_or_in_a_way_of_its_own_is_refused(
    example: float, way: str
) -> None:
    """Each stage had a buffer of its own, and one of them changed."""
    with pytest.raises(CaptureError, match=r"in stage 0, and stages \[0, 1\] use the same memory"):
        pipeline(WritesApart(way), (torch.full((2, 6), example),), split_spec={"b": SplitPoint.BEGINNING})
