from __future__ import annotations

from dataclasses import replace

import pytest
from tests.reporting.fake_report import fake_backward

from partita.errors import ReportError
from partita.reporting import BackwardPass, ReducedBucket

BUCKET = ReducedBucket(0, ("a",), 8, "float32", 0.1, 0.2, 0.3, 0.1)


@pytest.mark.parametrize("name", ["bucket", "size_bytes", "ready_s", "sent_s", "exposed_s"])
def test_a_quantity_below_zero_is_refused(name: str) -> None:
    with pytest.raises(
        ReportError, match=rf"ReducedBucket\.{name} is -1; give a finite number that is not negative"
    ):
        replace(BUCKET, **{name: -1})


def test_a_pass_that_takes_less_than_no_time_is_refused() -> None:
    with pytest.raises(ReportError, match=r"BackwardPass\.backward_s is -1"):
        BackwardPass(0, 1, -1, ())


def test_a_bucket_that_ends_before_it_is_sent_is_refused() -> None:
    with pytest.raises(ReportError, match=r"Bucket 0 is finished at 0.1 s, before it is sent \(0.2 s\)"):
        replace(BUCKET, finished_s=0.1)


def test_a_bucket_without_a_gradient_has_no_time_when_it_was_ready() -> None:
    assert replace(BUCKET, ready_s=None).ready_s is None


def test_a_pass_sums_up_its_buckets() -> None:
    found = fake_backward(4, pass_s=0.04, link_s=0.02)
    assert found.size_bytes == 4 * 25 * 2**20
    assert found.end_s == pytest.approx(0.09)
    assert found.exposed_s == pytest.approx(0.05)
    assert found.sent_early == 3


def test_a_pass_without_buckets_ends_with_its_last_gradient() -> None:
    assert BackwardPass(0, 1, 0.5, ()).end_s == 0.5
