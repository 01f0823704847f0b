from __future__ import annotations

import torch
from torch import nn

from partita.cudagraphs import CudaGraphsRunner
from partita.runtime import PieceRunner, PlainRunner
from partita.runtime.graph_compiler import runs_by_operator
from partita.runtime.piece_runner import OperatorRunner


def test_the_plain_runner_changes_nothing_and_remembers() -> None:
    runner = PlainRunner()
    stage, gm = nn.Linear(2, 2), torch.fx.symbolic_trace(lambda x: x + 1)
    assert isinstance(runner, PieceRunner)
    assert runner.for_module(stage) is stage
    assert runner.for_graph(gm, fixed_inputs=["x"], returned=1) is gm
    assert (runner.modules, runner.graphs) == ([stage], [gm])


def test_something_else_is_no_piece_runner() -> None:
    assert not isinstance(nn.Linear(2, 2), PieceRunner)


def test_who_runs_operator_by_operator_says_so() -> None:
    class Silent:
        for_module = PlainRunner.for_module
        for_graph = PlainRunner.for_graph

    assert isinstance(PlainRunner(), OperatorRunner)
    assert runs_by_operator(PlainRunner())
    assert runs_by_operator("aot_eager")
    assert runs_by_operator(CudaGraphsRunner(recorder="replay"))
    assert not runs_by_operator(CudaGraphsRunner(recorder="replay", inner="inductor"))
    assert not runs_by_operator("inductor")
    assert isinstance(Silent(), PieceRunner)
    assert not runs_by_operator(Silent())  # type: ignore[arg-type]
