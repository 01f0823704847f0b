from __future__ import annotations

import torch
from torch import nn

from partita.runtime import PieceRunner, PlainRunner


def test_the_plain_runner_changes_nothing_and_remembers() -> None:
    runner = PlainRunner()
    stage, gm = nn.Linear(2, 2), torch.fx.symbolic_trace(lambda x: x + 1)
    assert isinstance(runner, PieceRunner)
    assert runner.for_module(stage) is stage
    assert runner.for_graph(gm, fixed_inputs=["x"], returned=1) is gm
    assert (runner.modules, runner.graphs) == ([stage], [gm])


def test_something_else_is_no_piece_runner() -> None:
    assert not isinstance(nn.Linear(2, 2), PieceRunner)
