from __future__ import annotations

import logging

import pytest
from torch import nn
from torch.fx import symbolic_trace

from partita._torch.compile import ddp_graphs
from partita._torch.compile.ddp_graphs import name_cut, show_compiled, show_pieces


def test_pieces_are_in_the_log_and_in_the_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = {}

    def keep(name: str, metadata_fn: object = dict, *, payload_fn: object) -> None:
        traced[name] = (metadata_fn(), payload_fn())  # type: ignore[operator]

    monkeypatch.setattr(ddp_graphs, "trace_structured", keep)
    monkeypatch.setattr(ddp_graphs._LOG, "propagate", True)
    piece = symbolic_trace(nn.Linear(2, 2))
    with caplog.at_level(logging.DEBUG, ddp_graphs._LOG.name):
        show_pieces(piece, piece, {"submod_0": piece})
        show_compiled(piece)
    assert "---submod_0 graph---\ngraph():" in caplog.text
    assert "---final graph---" in caplog.text
    assert list(traced) == ["optimize_ddp_split_graph", "optimize_ddp_split_child"]
    assert traced["optimize_ddp_split_child"][0] == {"name": "submod_0"}
    assert "def forward(self, input" in traced["optimize_ddp_split_graph"][1]


def test_a_cut_has_a_reason_and_the_line_where_it_is() -> None:
    piece = symbolic_trace(lambda x: x.sin())
    (sin,) = piece.graph.find_nodes(op="call_method", target="sin")
    sin.meta["stack_trace"] = '  File "model.py", line 7, in forward\n    return x.sin()\n'
    name_cut(piece, "a bucket ends")
    reason = piece.compile_subgraph_reason
    assert (reason.reason, reason.graph_break) == ("a bucket ends", True)
    assert [(frame.filename, frame.lineno, frame.name) for frame in reason.user_stack] == [
        ("model.py", 7, "forward")
    ]
