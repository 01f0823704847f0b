"""What torch.fx keeps of the code that it generates."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, graph_module, symbolic_trace

from partita._torch.export.export import export_module
from partita._torch.graph_module.generated_sources import sources_dropped
from partita.pipelining import pipeline

KEPT = graph_module._loader.eval_cache


def _name(module: GraphModule) -> str:
    return str(type(module).forward.__code__.co_filename)


class _Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x


def test_only_what_is_kept_has_sources_afterwards() -> None:
    earlier = symbolic_trace(nn.ReLU())
    with sources_dropped() as keep:
        gone = symbolic_trace(nn.ReLU())
        inner = symbolic_trace(_Square())
        keep(nn.Sequential(nn.ReLU(), inner))
    assert _name(gone) not in KEPT
    assert _name(gone) not in linecache.cache
    assert _name(earlier) in KEPT
    assert _name(inner) in KEPT
    assert "matmul" in "".join(linecache.getlines(_name(inner)))
    torch.testing.assert_close(gone(torch.ones(2)), torch.ones(2))


def _trace_and_fail() -> None:
    with sources_dropped():
        symbolic_trace(nn.ReLU())
        raise KeyError


def test_nothing_is_left_where_it_fails() -> None:
    before = dict(KEPT)
    with pytest.raises(KeyError):
        _trace_and_fail()
    assert before == KEPT


def test_code_of_files_that_are_there_stays() -> None:
    with sources_dropped():
        KEPT["somewhere.py"] = "pass"
    assert KEPT.pop("somewhere.py") == "pass"


def test_an_export_leaves_none() -> None:
    before = dict(KEPT)
    export_module(nn.Linear(2, 2), (torch.ones(1, 2),), {}, way="eager")
    assert before == KEPT


def test_the_capture_of_a_pipeline_that_is_gone_leaves_none() -> None:
    def cut() -> None:
        pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.ones(2, 2),), stages=2, prove=False)

    cut()
    before = set(KEPT)
    cut()
    assert before == set(KEPT)
