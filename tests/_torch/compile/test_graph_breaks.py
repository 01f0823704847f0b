from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from partita._torch.compile.graph_breaks import Break, recorded_breaks

_LOG = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")


def breaks_of(model: nn.Module) -> list[Break]:
    torch._dynamo.reset()
    with recorded_breaks() as breaks:
        torch.compile(model, backend="eager")(torch.ones(2, 2))
    return breaks


def test_a_break_within_a_loop_leaves_the_whole_function_to_python_and_keeps_the_first_reason() -> None:
    class Loops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = x.sin()
                torch._dynamo.graph_break(msg="because of me")
            return x

    (item,) = breaks_of(Loops())
    assert item.skipped
    assert "because of me" in item.reason
    assert item.reason.endswith("as it lies in a loop, all of forward() runs as Python")
    assert "test_graph_breaks.py" in item.source
    assert "because of me" in item.source
    assert "graph break in loop" in item.details


def test_a_break_that_can_be_resumed_skips_nothing() -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

    (item,) = breaks_of(Breaks())
    assert not item.skipped
    assert item.reason.startswith("Call to `torch._dynamo.graph_break()`: User-inserted graph break")
    assert item.hint == "Remove the `torch._dynamo.graph_break()` call"


def test_a_function_that_is_excluded_is_named_without_its_address() -> None:
    class Excluded(nn.Module):
        @torch.compiler.disable
        def helper(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.helper(x).cos()

    (item,) = breaks_of(Excluded())
    assert "Excluded.helper" in item.reason
    assert " at 0x" not in item.reason


def test_a_function_that_is_compiled_too_often_runs_as_python() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.n

    model = Counts()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), recorded_breaks() as breaks:
        for model.n in range(4):
            compiled(torch.ones(2))
    assert breaks[0].skipped
    assert breaks[0].reason.startswith("forward() was compiled 2 times (recompile_limit)")
    assert "test_graph_breaks.py" in breaks[0].source


def test_the_logs_are_left_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    before = _LOG.level, _LOG.propagate, tuple(_LOG.handlers)
    with pytest.raises(ZeroDivisionError), recorded_breaks():
        raise ZeroDivisionError
    assert (_LOG.level, _LOG.propagate, tuple(_LOG.handlers)) == before
    assert not caplog.records
