"""Buffers that a microbatch saves and a later one overwrites."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH, Case
from tests.pipelining.running import Record, assert_same, cut, piped, uncut
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn import functional

from partita.errors import ExecutionError
from partita.pipelining import Schedule1F1B, ScheduleGPipe
from partita.pipelining.schedules import PipelineSchedule
from partita.pipelining.stages.backward.saved_buffers import SavedBuffers


class Remembers(nn.Module):
    """Multiplies with what it has seen, so autograd saves the buffer that each microbatch overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("seen", torch.zeros(2, WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            self.seen.mul_(0.5).add_(h)
        return self.d(self.c(self.b(h) * self.seen[:1] * self.scale))


class Weighs(nn.Module):
    """Changes the weights that it is about to use, as the layers of EDM2 do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.c.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            if self.training:
                with torch.no_grad():
                    layer.weight.mul_(0.75)
            x = layer(x)
        return x


CASE = Case("remembers", Remembers, ("b", "c"))
CASES = [CASE, Case("weighs", Weighs, ("b", "c"))]


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B], ids=lambda kind: kind.kind)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_microbatch_goes_back_with_what_it_found(
    case: Case, kind: type[PipelineSchedule], stages: int
) -> None:
    """A model that writes to its parameters was torch's error about a variable that was modified in place."""
    assert_same(piped(cut(case, stages), case, kind), uncut(case))


def test_an_evaluation_before_the_first_step_decides_nothing() -> None:
    def evaluated_first(runner: Any, modules: Sequence[nn.Module], case: Case, record: Record) -> None:
        args, _, target = case.data(8)
        record.outputs.append(runner.eval(*args))
        record.outputs.append(runner.step(*args, target=target))
        for module in modules:
            record.note(module)

    expected = uncut(CASE, run=evaluated_first)
    assert_same(piped(cut(CASE, 3), CASE, ScheduleGPipe, run=evaluated_first), expected)


def test_autograd_refuses_where_nobody_keeps_a_copy() -> None:
    model = CASE.model()
    first = model(torch.randn(2, WIDTH)).sum()
    model(torch.randn(2, WIDTH))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


class Decays(nn.Module):
    """Multiplies with tensors that some microbatches write to, and through ``.data`` uncounted."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.way = way
        self.calls = 0
        self.register_buffer("scale", torch.ones(WIDTH))
        self.factor = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.way == "counted" and self.calls % 2 == 0:
            self.scale.mul_(0.5)
        if self.way == "uncounted":
            self.scale.data.mul_(0.5)
        if self.way == "in an attribute":
            self.factor.data.mul_(0.5)
        return self.b(self.a(x) * self.scale * self.factor)


@pytest.mark.parametrize("way", ["counted", "uncounted", "in an attribute"])
def test_own_code_may_write_in_any_pass_and_through_data(way: str) -> None:
    """A buffer that the first microbatch only read was torch's error about a variable modified in place when
    a later one wrote to it; through ``.data`` the gradients were silently those of what was written last.
    """
    torch.manual_seed(0)
    module, x = Decays(way), torch.randn(2, WIDTH)
    alone = copy.deepcopy(module)
    kept, losses = SavedBuffers(module), []
    for _ in range(4):
        alone(x).sum().backward()
        with kept.kept() as note:
            losses.append(module(x).sum())
            note(losses[-1])
    for loss in losses:
        loss.backward()
    for ours, expected in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


def test_passes_that_saved_the_same_of_a_large_buffer_share_its_copy() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2**18))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module, x = Scales(), torch.ones((), requires_grad=True)
    kept, results = SavedBuffers(module), []
    for number in range(3):
        module.scale.data[0] = 1 + number // 2
        with kept.kept() as note:
            results.append(module(x))
            note(results[-1])
    memory = [result.grad_fn._saved_other.data_ptr() for result in results]
    assert memory[0] == memory[1] != memory[2]
    assert [torch.autograd.grad(result.sum(), x)[0].item() - 2**18 for result in results] == [0, 0, 1]


def _saved(module: nn.Module, x: Tensor) -> list[Tensor]:
    """What the second forward pass saves."""
    kept = SavedBuffers(module)
    for _ in range(2):
        with kept.kept() as note:
            result = module(x)
            note(result)
    return [getattr(result.grad_fn, name) for name in dir(result.grad_fn) if name.startswith("_saved_")]


class Assigns(nn.Module):
    """Puts another tensor in the place of its buffer, to which the next pass writes."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.mean.mul_(0.5) + 1
        if self.late:
            x = x * mean
            self.mean = mean
            return x
        self.mean = mean
        return x * self.mean


@pytest.mark.parametrize("late", [False, True], ids=["before it is used", "after it was used"])
def test_what_has_become_a_buffer_is_kept_too(late: bool) -> None:
    """A stage of the model's own code raised autograd's error in its first step."""
    x = torch.ones(WIDTH, requires_grad=True)
    alone, expected = Assigns(late), []
    for _ in range(3):
        (gradient,) = torch.autograd.grad(alone(x).sum(), x)
        expected.append(gradient)
    module = Assigns(late)
    kept, results = SavedBuffers(module), []
    for _ in range(3):
        with kept.kept() as note:
            results.append(module(x).sum())
            note(results[-1])
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(torch.autograd.grad(result, x)[0], wanted)


def test_a_buffer_that_a_graph_only_reads_is_not_copied() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.full((WIDTH,), 2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = symbolic_trace(Reads())
    assert any(value is module.scale for value in _saved(module, torch.ones(WIDTH, requires_grad=True)))


def test_statistics_that_batch_norm_writes_cost_nothing() -> None:
    module = nn.BatchNorm1d(WIDTH)
    kept = SavedBuffers(module)
    x = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(2):
        with kept.kept():
            result = functional.relu(module(x))
    assert result.grad_fn._raw_saved_result.unpack_hook is None


def test_what_is_neither_buffer_nor_parameter_is_refused_where_copies_are_kept_too() -> None:
    """Where a buffer was kept, autograd did not look at other tensors: gradients came of what a later
    microbatch had written.
    """

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(WIDTH)
            self.register_buffer("scale", torch.ones(WIDTH))
            self.child = symbolic_trace(nn.Identity())  # of graphs copies are kept as autograd saves

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.seen.add_(1)
                self.scale.add_(1)
            return x * self.seen * self.scale

    module, x = Counts(), torch.ones(WIDTH, requires_grad=True)
    kept, results = SavedBuffers(module), []
    for _ in range(2):
        with kept.kept():
            results.append(module(x).sum())
    with pytest.raises(ExecutionError, match=r"float32\[8\]\) that a backward pass needs was written to"):
        torch.autograd.grad(results[0], x)
    assert torch.equal(torch.autograd.grad(results[1], x)[0], torch.full((WIDTH,), 6.0))


@pytest.mark.parametrize("counts", [False, True], ids=["without buffers", "with one that it writes to"])
def test_a_model_whose_code_refuses_hooks_on_saved_tensors_runs(counts: bool) -> None:
    """As code with ``torch.func.grad`` does. With a buffer in its stage it raised torch's own error, by
    ``frontend="modules"``, which is the only way to cut most such models.
    """

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            if counts:
                self.register_buffer("calls", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.func.grad(lambda value: value.exp().sum())(self.linear(x))
            if counts:
                self.calls.add_(1)
                x = x * self.calls
            return x

    torch.manual_seed(0)
    module, x = Forces(), torch.ones(2, WIDTH, requires_grad=True)
    alone, expected = copy.deepcopy(module), []
    for _ in range(3):
        expected += torch.autograd.grad(alone(x).sum(), x)
    kept, results = SavedBuffers(module), []
    for _ in range(3):
        with kept.kept() as note:
            result = module(x)
            note(result)
        results.append(result.sum())
    assert kept.idle != counts
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(torch.autograd.grad(result, x)[0], wanted)
