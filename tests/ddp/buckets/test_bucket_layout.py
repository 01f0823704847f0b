"""Every gradient has its place in a bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.ddp.buckets.bucket_layout import lay_out
from partita.errors import PlanError
from partita.planning import BucketPlan


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    wide=st.lists(st.booleans(), min_size=12, max_size=12),
    cap=st.integers(1, 300),
)
def test_every_parameter_has_one_place_in_a_bucket_of_its_kind(
    sizes: list[int], wide: list[bool], cap: int
) -> None:
    tensors = [
        torch.zeros(size, dtype=torch.float64 if is_wide else torch.float32)
        for size, is_wide in zip(sizes, wide, strict=False)
    ]
    names = [f"p{index}" for index in range(len(tensors))]
    order = list(reversed(range(len(tensors))))
    buckets = lay_out(names, tensors, order, cap_bytes=cap)
    assert sorted(slot.index for bucket in buckets for slot in bucket.slots) == sorted(order)
    for number, bucket in enumerate(buckets):
        assert bucket.number == number
        assert {tensors[slot.index].dtype for slot in bucket.slots} == {bucket.dtype}
        assert bucket.elements == sum(tensors[slot.index].numel() for slot in bucket.slots)
        without_last = sum(tensors[slot.index].nbytes for slot in bucket.slots[:-1])
        assert without_last < cap
        offsets = [slot.offset for slot in bucket.slots]
        assert offsets == sorted(offsets)


def test_a_plan_decides_the_buckets_and_kinds_are_kept_apart() -> None:
    tensors = [torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    plan = BucketPlan((("c", "a"), ("b",)), (24, 8), (0.0, 0.0), (0.0, 0.0), 0.0)
    buckets = lay_out(["a", "b", "c"], tensors, [2, 1, 0], cap_bytes=1, plan=plan)
    assert [bucket.names for bucket in buckets] == [("c",), ("a",), ("b",)]


def test_a_plan_for_another_model_is_refused() -> None:
    plan = BucketPlan((("x",),), (8,), (0.0,), (0.0,), 0.0)
    with pytest.raises(PlanError, match="names 'x', which is no trainable parameter"):
        lay_out(["a"], [torch.zeros(2)], [0], cap_bytes=1, plan=plan)
    plan = BucketPlan((("a",),), (8,), (0.0,), (0.0,), 0.0)
    with pytest.raises(PlanError, match="leaves out 1 of 2 parameters, 'b' among them"):
        lay_out(["a", "b"], [torch.zeros(2)] * 2, [0, 1], cap_bytes=1, plan=plan)
    plan = BucketPlan((("a",), ("b", "a")), (8, 16), (0.0, 0.0), (0.0, 0.0), 0.0)
    with pytest.raises(PlanError, match="names 'a' twice: put each parameter into one bucket"):
        lay_out(["a", "b"], [torch.zeros(2)] * 2, [0, 1], cap_bytes=1, plan=plan)
