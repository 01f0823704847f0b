"""A captured graph into its stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from partita import verify
from partita._torch.autograd.region_switches import SET_GRAD
from partita.errors import InfeasiblePlan
from partita.pipelining import pipe_split, pipeline
from partita.pipelining.frontends.graph import cut_graph as room
from partita.pipelining.frontends.graph.cut_graph import copied_for_a_stage, cut_graph


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin(), 0.5)
        with torch.no_grad():
            return x.cos()


def _graph() -> tuple[GraphModule, list[str]]:
    gm = torch.export.export(Model(), (torch.ones(2),)).module()
    assert isinstance(gm, GraphModule)
    return gm, [node.name for node in gm.graph.nodes if node.op.startswith("call_")]


def test_a_stage_gets_its_random_calls_with_what_seeds_them() -> None:
    gm, names = _graph()
    cut = cut_graph(gm, {name: int(name != "sin") for name in names})
    assert [piece.key for piece in cut.pieces] == ["pp_0", "pp_1"]
    first, second = (
        [str(node.target) for node in piece.module.graph.nodes if node.op == "call_function"]
        for piece in cut.pieces
    )
    assert not any("enter_site" in target for target in first)
    assert "enter_site" in second[0]


def test_a_stage_that_only_switches_a_region_is_refused() -> None:
    graph = Graph()
    sin = graph.call_function(torch.sin, (graph.placeholder("x"),))
    off = graph.call_function(SET_GRAD, (False,))
    cos = graph.call_function(torch.cos, (sin,))
    on = graph.call_function(SET_GRAD, (True,))
    graph.output(cos)
    stages = {sin.name: 0, off.name: 1, cos.name: 2, on.name: 2}
    with pytest.raises(InfeasiblePlan, match="the cuts ask for 3 stages, but 2 have anything to compute"):
        cut_graph(GraphModule({}, graph), stages)


class _WritesPastACut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        view = hidden[:1]
        pipe_split()
        hidden.mul_(2)
        pipe_split()
        return self.last(view)


class _WritesForItself(_WritesPastACut):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        pipe_split()
        kept = hidden.sin()
        hidden.mul_(2).add_(kept)
        pipe_split()
        return self.last(hidden)


def test_a_write_that_gets_lost_between_processes_is_lost_in_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stages handed each other values without a copy when a pipe was called, and `verify` called a cut equal
    whose stages on ranks of their own compute other numbers.
    """
    model, x = _WritesPastACut(), torch.randn(2, 4)
    monkeypatch.setattr(room, "check_writes", lambda *_: None)  # which refuses such a cut
    verdict = verify(pipeline(model, (x,)), model, (x,))
    assert any(difference.kind == "output" for difference in verdict.differences)


def test_a_stage_writes_into_what_it_is_handed_for_itself() -> None:
    model, x = _WritesForItself(), torch.randn(2, 4)
    pipe = pipeline(model, (x,))
    verify(pipe, model, (x,)).check()
    assert len(pipe.split_gm.graph.find_nodes(op="call_function", target=copied_for_a_stage)) == 1
