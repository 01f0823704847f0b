"""From an explanation to the rows of its report."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partita.cli.pages.capture_rows import capture_report
from partita.cudagraphs import explain


class Asking(nn.Module):
    """The host waits for a value in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin().cos()
        return (h * h.sum().item()).sin().cos()


def test_graphs_are_counted_by_kind_and_what_is_left_out_has_its_line() -> None:
    report = capture_report(explain(Asking(), (torch.ones(3),), device="cuda"), "a title")
    assert (report.title, report.assumed) == ("a title", not torch.cuda.is_available())
    assert [graph.name for graph in report.graphs] == [f"inference {n}" for n in range(len(report.graphs))]
    assert all(row.captured for graph in report.graphs for row in graph.regions)
    assert report.environment["torch"] == torch.__version__
    lines = [row.source for graph in report.graphs for row in graph.left_out]
    lines += [row.source for row in report.breaks]
    assert any(line.endswith("return (h * h.sum().item()).sin().cos()") for line in lines)
