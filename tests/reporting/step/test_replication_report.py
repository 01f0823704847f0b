"""A report of what a replicated module did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.reporting.step.test_html import Page
from torch import nn

from partita.ddp import replicate
from partita.errors import ReportError
from partita.planning import BucketPlan
from partita.reporting import RunReport, backward_pass, render_html, replication_report
from partita.runtime import InProcessWorld


def trained(comm: Any, steps: int = 2) -> Any:
    torch.manual_seed(0)
    module: Any = replicate(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), comm, bucket_cap_mb=0.0001)
    for _ in range(steps):
        module(torch.ones(2, 8)).sum().backward()
    return module


def test_a_report_has_the_buckets_and_times_of_the_last_pass() -> None:
    def body(comm: Any) -> tuple[Any, Any, RunReport]:
        replication = trained(comm).replication
        return replication.rows(), replication.last_pass, replication_report(replication, title="Two layers")

    rows, times, report = InProcessWorld(2).run(body)[0]
    assert report.backward is not None
    assert (report.backward.rank, report.backward.ranks) == (0, 2)
    assert len(report.backward.buckets) == len(rows) >= 2
    for bucket, row, measured in zip(report.backward.buckets, rows, times.buckets, strict=True):
        assert (bucket.parameters, bucket.size_bytes, bucket.dtype) == (row.parameters, row.bytes, "float32")
        assert (bucket.ready_s, bucket.sent_s) == (measured.ready_s, measured.sent_s)
        assert (bucket.finished_s, bucket.exposed_s) == (measured.finished_s, measured.exposed_s)
    assert report.backward.backward_s == times.backward_end_s - times.started_s
    assert report.subtitle == "The last backward pass, on rank 0 of 2"


def test_its_page_shows_the_buckets_and_nothing_of_a_pipeline() -> None:
    def body(comm: Any) -> RunReport:
        return replication_report(
            trained(comm).replication, title="Two layers", subtitle="small", environment={"torch": "2"}
        )

    page = Page(render_html(InProcessWorld(1).run(body)[0]))
    headings = {attributes.get("id") for tag, attributes in page.tags if tag == "h2"}
    assert headings == {"buckets", "environment"}
    for words in ("Two layers", "small", "Exposed communication", "1.weight", "by one rank alone"):
        assert words in page.words


def test_before_the_first_reduced_pass_there_is_nothing_to_report() -> None:
    def body(comm: Any) -> None:
        with pytest.raises(ReportError, match="no times of the present buckets: take a step that reduces"):
            replication_report(trained(comm, 0).replication, title="t")

    InProcessWorld(1).run(body)


def test_times_of_buckets_that_are_no_more_are_not_reported() -> None:
    def body(comm: Any) -> None:
        replication = trained(comm).replication
        names = tuple(replication.reducer.names)
        replication.use(BucketPlan((names,), (576,), (0.0,), (0.0,), 0.0))
        with pytest.raises(ReportError, match="no times of the present buckets"):
            backward_pass(replication)

    InProcessWorld(1).run(body)
