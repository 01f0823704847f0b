"""Values and gradients lie in memory behind a border as they do in the whole model, so that sums keep their
bits.

BatchNorm2d before a border with a concatenation behind it told: its gradient is a slice in the whole model
and was contiguous after the transfer, and BatchNorm's backward takes another path for each.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.fuzz.models import PLACEMENTS
from torch import Tensor, nn

from partita.pipelining import (
    Pipe,
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    get_schedule_class,
    pipeline,
)
from partita.pipelining.interface.layout import (
    copied,
    is_compact,
    laid_out,
    packed,
    trailer_length,
    trailer_of,
    zeros_like_sent,
)
from partita.runtime import Comm, InProcessWorld

LAYOUTS = {
    "contiguous": torch.randn(2, 3, 4),
    "a number": torch.randn(()),
    "empty": torch.randn(0, 3),
    "transposed": torch.randn(2, 3, 4).transpose(1, 2),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, of one pixel": torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
    "a slice": torch.randn(2, 8, 3)[:, 2:5],
    "every other": torch.randn(3, 8)[:, ::2],
    "a slice, transposed": torch.randn(4, 6, 3)[:, 1:3].transpose(0, 2),
    "expanded": torch.randn(2, 1, 3).expand(2, 5, 3),
    "a number, expanded": torch.randn(()).expand(2, 3),
    "a slice, expanded": torch.randn(4, 1, 6)[1:3, :, ::2].expand(2, 3, 3),
    "windows": torch.randn(2, 9).unfold(1, 4, 1),
    "as_strided": torch.randn(40).as_strided((3, 4), (2, 3), 5),
    "misaligned": torch.randn(9)[3:],
    "misaligned, transposed": torch.randn(2 * 3 * 4)[12:].view(3, 4).t(),
    "bfloat16": torch.randn(4, 6, dtype=torch.bfloat16)[:, 1:],
    "integers": torch.arange(12).view(3, 4).t(),
    "flags": torch.tensor([[True, False], [False, False]]).t(),
    "complex, conjugated": torch.randn(3, 4, dtype=torch.complex64)[:, ::2].conj(),
}


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % 64


def _sent(values: list[Tensor | None], data: list[Tensor]) -> list[Tensor | None]:
    """What the receiver has."""
    trailer = trailer_of(values, data)
    assert trailer.numel() == trailer_length(data)
    return laid_out(trailer, [numbers.resolve_conj().contiguous().clone() for numbers in data])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_value_arrives_as_it_lay(name: str) -> None:
    value = LAYOUTS[name]
    (received,) = _sent([value], [packed(value)])
    assert received is not None
    assert _lies(received) == _lies(value)
    assert received.dtype == value.dtype
    assert torch.equal(received, value)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_lies_like_the_tensor_and_its_gradient_as_it_came(name: str) -> None:
    tensor = LAYOUTS[name]
    if tensor.is_floating_point():
        tensor = tensor.detach().requires_grad_()
    clone = copied(tensor)
    assert _lies(clone) == _lies(tensor)
    assert torch.equal(clone, tensor)
    assert not clone.numel() or clone.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    if tensor.requires_grad:
        seed = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        (gradient,) = torch.autograd.grad(clone, tensor, seed)
        assert gradient.stride() == seed.stride()


def test_a_copy_with_gaps_can_be_written_to_in_place() -> None:
    leaf = torch.randn(3, 6, requires_grad=True)
    clone = copied((leaf * 1)[:, 1:3])
    clone.mul_(2)
    clone.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros(3, 6).index_fill(1, torch.tensor([1, 2]), 2.0))


def test_a_value_that_is_not_there_is_told_from_others() -> None:
    here = torch.randn(4, 4).t()
    first, second, third = _sent([None, here, None], [torch.zeros(()), packed(here), torch.zeros(2, 3)])
    assert first is None
    assert third is None
    assert second is not None
    assert torch.equal(second, here)


def test_what_lies_without_gaps_is_neither_copied_for_sending_nor_behind() -> None:
    for value in (torch.randn(3, 4), torch.randn(3, 4).t(), torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2)):
        data = packed(value)
        assert data.is_contiguous()
        assert data.data_ptr() == value.data_ptr()
        (received,) = laid_out(trailer_of([value], [data]), [data])
        assert received is not None
        assert received.data_ptr() == value.data_ptr()


def test_the_pieces_of_a_tensor_take_its_memory_once() -> None:
    pieces = list(torch.randn(6, 64).chunk(16, 1))
    received = _sent([*pieces], [packed(piece) for piece in pieces])
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for value in received
        if value is not None
    }
    assert sum(storages.values()) <= 6 * 64 * 4
    for value, piece in zip(received, pieces, strict=True):
        assert value is not None
        assert _lies(value) == _lies(piece)
        assert torch.equal(value, piece)


def test_pieces_that_are_far_apart_do_not_take_what_lies_between() -> None:
    base = torch.randn(100, 4, 8)
    pieces = [base[0, :, ::2], base[99, :, ::2]]
    received = _sent([*pieces], [packed(piece) for piece in pieces])
    for value, piece in zip(received, pieces, strict=True):
        assert value is not None
        assert _lies(value) == _lies(piece)
        assert value.untyped_storage().nbytes() <= 4 * 8 * 4


@pytest.mark.parametrize("samples", [2, 5])
def test_zeros_lie_as_what_was_sent_from_such_an_example(samples: int) -> None:
    def lies(example: Tensor, value: Tensor) -> bool:
        zeros = zeros_like_sent(
            example.shape, example.stride(), value.shape, torch.float64, torch.device("cpu")
        )
        assert zeros is not None
        assert not zeros.any()
        return (zeros.shape, zeros.stride(), zeros.dtype) == (value.shape, value.stride(), torch.float64)

    example, value = torch.ones(2, 3, 4, 4), torch.ones(samples, 3, 4, 4)
    assert lies(example, value)
    assert lies(example.transpose(0, 2), value.transpose(0, 2))
    last = torch.channels_last
    assert lies(example.to(memory_format=last), value.to(memory_format=last))
    slices = [one[:, 1:] for one in (example, value)]
    if samples == 2:
        assert lies(*slices)
    else:
        (left, right) = slices
        assert zeros_like_sent(left.shape, left.stride(), right.shape, left.dtype, left.device) is None


def test_what_lies_like_a_new_tensor() -> None:
    compact = {name for name, tensor in LAYOUTS.items() if is_compact(tensor)}
    assert compact == {"contiguous", "a number", "empty"}


class Fuse(nn.Module):
    """Two features side by side, as in feature pyramids, U-Nets and DenseNets; then other odd layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 1)
        self.left = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(16, 16, 1)
        self.norm = nn.BatchNorm2d(8)
        self.tokens = nn.Linear(8, 8)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        right = self.right(x)
        left = self.left(x)
        first, second = self.wide(torch.cat([left, right], 1)).chunk(2, 1)
        first = self.norm(first)
        rows = self.tokens(second.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(torch.cat([rows + right, first * left.mean(1, keepdim=True).expand_as(first)], 1))


CUTS = {"left": SplitPoint.END, "wide": SplitPoint.END, "norm": SplitPoint.END}


def _mean(output: Tensor, _: Any = None) -> Tensor:
    """Its gradient is one number, expanded."""
    return output.mean()


@pytest.fixture(scope="module")
def fused() -> tuple[Pipe, Tensor, dict[str, Tensor | None]]:
    """The model, a batch, and the eager model's gradients."""
    torch.manual_seed(0)
    model, x = Fuse(), torch.randn(8, 3, 7, 7)
    pipe = pipeline(model, (x[:2],), split_spec=CUTS)
    eager = copy.deepcopy(model)
    for part in x.split(2):
        (_mean(eager(part)) / 4).backward()
    return pipe, x, {name: parameter.grad for name, parameter in eager.named_parameters()}


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_gradients_are_those_of_the_eager_model_under_any_schedule(kind: str, fused: Any) -> None:
    pipe, x, expected = fused
    placement = PLACEMENTS[kind]

    def body(comm: Comm) -> dict[str, Tensor | None]:
        own = copy.deepcopy(pipe)
        stages = [
            own.build_stage(stage, comm=comm) for stage, rank in enumerate(placement) if rank == comm.rank
        ]
        get_schedule_class(kind)(stages, 4, _mean).step(x, target=torch.zeros(8))
        return {name: value.grad for stage in stages for name, value in stage.module.named_parameters()}

    gradients = {
        name: grad for rank in InProcessWorld(max(placement) + 1).run(body) for name, grad in rank.items()
    }
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


def test_an_evaluation_in_inference_mode_leaves_nothing_that_others_can_not_use(fused: Any) -> None:
    pipe, x, _ = fused

    def body(comm: Comm) -> list[Tensor]:
        schedule = ScheduleGPipe(copy.deepcopy(pipe).eval().build_stage(comm.rank, comm=comm), 4, _mean)
        with torch.inference_mode():
            schedule.eval(x)
        return [schedule.eval(x), schedule.step(x, target=torch.zeros(8))]

    first, second = InProcessWorld(4).run(body)[-1]
    assert torch.equal(first, second)


class Spied(torch.autograd.Function):
    """Notes how a value and its gradient lie."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, notes: list[Any]) -> Tensor:
        ctx.notes = notes
        if type(x) is Tensor:  # and not one without memory, from which shapes are found
            notes.append(("value", *_lies(x)))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.notes.append(("gradient", *_lies(gradient)))
        return gradient, None


class Spy(nn.Module):
    """Of several values."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.notes: list[Any] = []

    def forward(self, *values: Tensor) -> Any:
        values = tuple(Spied.apply(value, self.notes) for value in values)
        results = self.inner(*values)
        several = isinstance(results, tuple)
        results = tuple(Spied.apply(result, self.notes) for result in (results if several else (results,)))
        return results if several else results[0]


class Spread(nn.Module):
    """Makes values of all kinds of layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = self.wide(x).chunk(3, 1)
        return (
            first,
            second.transpose(2, 3),
            third.mean(1, keepdim=True).expand(-1, 4, -1, -1),
            first.flatten(1).unfold(1, 6, 3),
            torch.cat([second, third])[x.shape[0] :],
            third.contiguous(memory_format=torch.channels_last).bfloat16(),
        )


class Gather(nn.Module):
    """Gives gradients of all kinds of layouts."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
        joined = torch.cat([a, b.transpose(2, 3), c, f.float()], 1)
        return torch.cat([joined, e], 1).mean((2, 3)).square() + d.mean((1, 2))[:, None] + b.sum()


def _spied(stages: list[Spy], x: Tensor) -> list[list[Any]]:
    for part in x.split(3):
        values = stages[0](part)
        torch.autograd.backward(_mean(stages[1](*values)), torch.tensor(0.5))
    return [sorted(stage.notes) for stage in stages]


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_values_and_gradients_of_plain_modules_lie_as_in_the_whole(kind: type) -> None:
    torch.manual_seed(0)
    modules, x = [Spread(), Gather()], torch.randn(6, 3, 5, 5)
    expected = _spied([Spy(copy.deepcopy(module)) for module in modules], x)

    def body(comm: Comm) -> list[Any]:
        spy = Spy(modules[comm.rank])
        stage = PipelineStage(spy, comm.rank, 2, "cpu", comm=comm)
        kind(stage, 2, _mean).step(*((x,) if comm.rank == 0 else ()), target=torch.zeros(6))
        return sorted(spy.notes)

    assert InProcessWorld(2).run(body) == expected
