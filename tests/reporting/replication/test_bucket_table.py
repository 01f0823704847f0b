from __future__ import annotations

from dataclasses import replace

from tests.reporting.fake_report import fake_backward
from tests.reporting.plan.test_tables import printed

from partita.reporting import bucket_table


def test_each_bucket_has_a_row_with_what_it_holds_and_when_it_went() -> None:
    backward = fake_backward(2, pass_s=0.04, link_s=0.03)
    lines = printed(bucket_table(backward), 200).splitlines()
    (first,) = [line for line in lines if "│      0 │" in line]
    for words in ("layers.8.w", "(float32)", "25.0 MiB", "20.0 ms", "20.4 ms", "50.0 ms", "10.0 ms"):
        assert words in first
    (sums,) = [line for line in lines if " all " in line]
    for words in ("50.0 MiB", "80.0 ms", "40.0 ms"):
        assert words in sums


def test_a_bucket_that_no_gradient_came_to_says_so() -> None:
    backward = fake_backward(1)
    backward = replace(backward, buckets=(replace(backward.buckets[0], ready_s=None),))
    assert "no gradient" in printed(bucket_table(backward))


def test_a_single_bucket_has_no_row_of_totals() -> None:
    assert " all " not in printed(bucket_table(fake_backward(1)))


def test_brackets_in_the_name_of_a_parameter_are_no_markup() -> None:
    backward = fake_backward(1)
    named = replace(backward, buckets=(replace(backward.buckets[0], parameters=("[bold]w[/bold]",)),))
    assert "[bold]w[/bold]" in printed(bucket_table(named))
