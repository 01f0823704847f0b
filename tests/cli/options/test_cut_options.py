"""Where a command cuts a model."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from partita.cli.models.user_file import Built
from partita.cli.options.cut_options import CutRequest
from partita.errors import UsageError


class Twice(nn.Module):
    """Calls one layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.stdout.write("noise")
        return self.layer(self.layer(x).relu())


def test_a_stage_begins_at_one_of_several_calls(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = CutRequest(split_at=("layer@1",)).cut(Built(Twice(), (torch.ones(2, 4),)))
    assert pipe.num_stages == 2
    assert [tied.stages for tied in pipe.routes.tied] == [(0, 1), (0, 1)]
    assert capsys.readouterr().out == ""


def test_stages_are_planned() -> None:
    options = CutRequest(stages=3)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert (options.number, options.cut(Built(model, (torch.ones(2, 4),))).num_stages) == (3, 3)


@pytest.mark.parametrize(
    ("stages", "names", "message"),
    [
        (None, (), "there is neither --stages nor --split-at: give --stages 2, or"),
        (None, ("a", "b", "a"), "--split-at a is given twice"),
        (2, ("a",), "--stages is 2, and --split-at says it too"),
        (-1, (), "--stages is -1: give 1 or more"),
    ],
)
def test_other_requests_are_refused(stages: int | None, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CutRequest(stages, names)
