"""The buckets as a table and as spans."""

from __future__ import annotations

import torch

from partita.ddp.buckets.bucket_layout import lay_out
from partita.ddp.buckets.bucket_report import BucketRow, PassTimes, bucket_rows, bucket_table


def test_the_table_shows_what_is_known() -> None:
    tensors = [torch.zeros(300), torch.zeros(2)]
    buckets = lay_out(["a", "b"], tensors, [0, 1], cap_bytes=1000)
    rows = bucket_rows(buckets, None)
    assert rows == (BucketRow(0, ("a",), 1200, "float32"), BucketRow(1, ("b",), 8, "float32"))
    text = bucket_table([*rows, BucketRow(2, tuple("cdefg"), 5, "float64", 0.001, 0.002, 0.0035)])
    assert "1,200" in text
    assert "3.50 ms  c, d, e and 2 more (float64)" in text


def test_times_of_buckets_that_are_no_more_are_not_shown() -> None:
    buckets = lay_out(["a", "b"], [torch.zeros(2)] * 2, [0, 1], cap_bytes=1)
    (row, _) = bucket_rows(buckets, PassTimes(0.0, 1.0, (), {}))
    assert (row.ready_s, row.sent_s, row.exposed_s, row.finished_s) == (None,) * 4
