"""Why a function could not be compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from partita._torch.compile.refusal import is_refusal, refusal_text


def _refusal(function: Any, backend: Any = "eager") -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any
        torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2))
    return raised.value


def _breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def test_a_graph_break_is_a_refusal_and_its_text_names_the_line() -> None:
    error = _refusal(_breaks)
    assert is_refusal(error)
    text = refusal_text(error)
    assert "graph_break" in text
    assert "test_refusal.py:" in text
    assert "\n" not in text


def test_what_the_backend_raises_is_named() -> None:
    def backend(*_: Any) -> Any:
        raise KeyError("no kernel for it")

    text = refusal_text(_refusal(lambda x: x + 1, backend))
    assert text.startswith("KeyError: 'no kernel for it'")


def test_a_function_that_was_compiled_too_often_is_refused() -> None:
    function = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        function(torch.ones(2))
        with pytest.raises(FailOnRecompileLimitHit) as raised:
            function(torch.ones(3))
        assert is_refusal(raised.value)
        assert "recompile_limit is 1)" in refusal_text(raised.value)


def test_an_error_of_the_function_while_it_runs_is_none() -> None:
    assert not is_refusal(RuntimeError("out of memory"))
