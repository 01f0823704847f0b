"""Fingerprints tell different bits apart, of any dtype and layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.pipelining.checkpoints.contents import fingerprint as module
from partita.pipelining.checkpoints.contents.fingerprint import fingerprint

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_have_equal_fingerprints_however_they_lie_in_memory(dtype: torch.dtype) -> None:
    values = torch.randint(2, (6, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = fingerprint(values)
    assert fingerprint(values.t().contiguous().t()) == expected
    padded = torch.zeros(31, dtype=dtype)
    padded[1:] = values.flatten()
    assert fingerprint(padded[1:]) == expected  # not aligned to a word


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.data())
def test_any_changed_byte_shows(size: int, data: st.DataObject) -> None:
    values = torch.arange(size).to(torch.uint8)
    other = values.clone()
    other[data.draw(st.integers(0, size - 1))] += data.draw(st.integers(1, 255))
    assert fingerprint(values) != fingerprint(other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=50), st.randoms(use_true_random=False))
def test_another_order_shows(values: list[int], random: object) -> None:
    shuffled = sorted(values)
    one, other = torch.tensor(values, dtype=torch.float64), torch.tensor(shuffled, dtype=torch.float64)
    assert (fingerprint(one) == fingerprint(other)) == (values == shuffled)


def test_blocks_that_change_places_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._BLOCK, "cpu", 64)
    values = torch.arange(40.0)
    moved = torch.cat((values[16:32], values[:16], values[32:]))
    assert fingerprint(values) != fingerprint(moved)


def test_what_compares_equal_may_still_be_other_bits() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert fingerprint(nan) == fingerprint(nan.clone())


def test_empty_and_single_values_have_one_too() -> None:
    assert fingerprint(torch.zeros(0)) == 0
    assert fingerprint(torch.tensor(3)) != fingerprint(torch.tensor(4))
