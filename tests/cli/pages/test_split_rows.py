"""From a pipe to the rows of its report."""

from __future__ import annotations

import torch
from torch import nn

from partita.cli.models.user_file import Built
from partita.cli.options.cut_options import CutRequest
from partita.cli.pages.split_rows import split_report


class Other(nn.Module):
    """Takes another path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x.relu() if self.training else x.sigmoid().tanh())


def test_sizes_are_the_examples_where_the_batch_is_open() -> None:
    built = Built(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).double(), (torch.ones(3, 4).double(),))
    pipe = CutRequest(split_at=("1",)).cut(built)
    assert pipe.routes.symbols
    report = split_report(pipe, built, "a", "b")
    (row,) = report.crossings
    assert (row.forward_bytes, row.backward_bytes) == (3 * 8 * 8, 3 * 8 * 8)
    assert row.values == ("linear: float64[3, 8]",)
    assert [piece.modules for piece in report.pieces] == [("0",), ("1",)]


def test_a_model_with_a_path_for_each_mode_is_described() -> None:
    built = Built(Other(), (torch.ones(3, 4),))
    report = split_report(CutRequest(split_at=("second",)).cut(built), built, "a", "b")
    assert [piece.parameters for piece in report.pieces] == [40, 36]
    assert [piece.modules[-1:] for piece in report.pieces] == [("first",), ("second",)]
