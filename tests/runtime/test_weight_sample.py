"""Samples of weights: equal where weights are, other ones where they are not, in any dtype and layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from partita.runtime.weight_sample import SAMPLE_FLAGS, WeightSample, samples_differ

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int8)


def weights(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(7, 5), (3,), (), (0,), (4, 3, 2, 2), (300, 40), (6, 8)]
    tensors = [torch.randn(shape).mul(40).to(dtype) for shape in shapes]
    tensors[4] = tensors[4].to(memory_format=torch.channels_last)
    tensors[6] = tensors[6].t()
    return tensors


def differ(left: list[Tensor], right: list[Tensor], steps: int) -> list[bool]:
    """Whether each step sees a difference, between two ranks with a bucket of bfloat16."""
    samples = [WeightSample(left), WeightSample(right)]
    summed = [sum(sample.flags(step).to(torch.bfloat16) for sample in samples) for step in range(steps)]
    return [samples_differ(flags.tolist()) for flags in summed if isinstance(flags, Tensor)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_weights_have_equal_samples(dtype: torch.dtype) -> None:
    assert not any(differ(weights(dtype), weights(dtype), 40))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_all_differ_are_seen_in_nearly_each_step(dtype: torch.dtype) -> None:
    others = [tensor * 2 + 1 for tensor in weights(dtype)]
    assert sum(differ(weights(dtype), others, 60)) > 50


def test_a_single_number_is_seen_in_time() -> None:
    others = weights(torch.float32)
    others[5][123, 17] += 1e-3  # one of 12,000, in one of six tensors
    assert sum(differ(weights(torch.float32), others, 6 * 300)) > 0


@pytest.mark.parametrize("count", [256, 300, 768, 4096])
@pytest.mark.parametrize("values", [(0.0, 1.0), (1.0, 1.001)], ids=str)
def test_gains_that_are_all_alike_are_told_from_others(count: int, values: tuple[float, float]) -> None:
    """As those of norms; and they often are as many as a power of two, whose sum has a lowest byte of 0."""
    left, right = ([torch.full((count,), value)] for value in values)
    assert all(differ(left, right, 10))


@pytest.mark.parametrize("count", [257, 511, 700])
def test_the_last_number_is_seen_too(count: int) -> None:
    other = torch.zeros(count)
    other[-1] = 1.0
    assert any(differ([torch.zeros(count)], [other], 10))


def test_a_part_of_a_convolution_is_seen_in_any_memory_format() -> None:
    weight = torch.randn(64, 32, 3, 3).to(memory_format=torch.channels_last)
    other = weight.clone()
    other[:32, 16:] += 1.0
    assert sum(differ([weight], [other], 30)) > 20


def test_a_memory_format_is_no_difference() -> None:
    """Copies of a tied parameter would be called different, which nobody can mend."""
    weight = torch.randn(8, 6, 3, 3)
    assert not any(differ([weight], [weight.to(memory_format=torch.channels_last)], 10))


def test_lazy_conjugates_and_negatives_have_samples() -> None:
    """Memory that a view says to be something else can't be looked at as bytes."""
    conjugate = torch.randn(5, dtype=torch.complex64).conj()
    for view in (conjugate, conjugate.imag):
        assert not any(differ([view], [view.clone()], 10))
        assert any(differ([view], [view + 1], 10))


def test_what_has_no_numbers_has_no_sample() -> None:
    assert WeightSample([torch.empty(0)]).flags(3).tolist() == [0] * SAMPLE_FLAGS
