"""Why a function could not be compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.fx import symbolic_trace

from partita._torch.compile.refusal import (
    Uncompilable,
    changed_by_tracing,
    check_compiles_nothing,
    check_recurrent,
    is_refusal,
    refusal_text,
)


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


def test_a_tracer_that_fails_within_a_region_refuses() -> None:
    """What Dynamo of torch 2.11 makes of a graph with autocast regions ended the step."""
    error = AssertionError("Global autocast(cpu)_enabled state changed while dynamo tracing, please report")
    assert is_refusal(error)
    assert "can't trace its autocast regions (Global autocast(cpu)_enabled" in refusal_text(error)


def test_an_error_of_the_function_while_it_runs_is_none() -> None:
    assert not is_refusal(RuntimeError("out of memory"))
    assert not is_refusal(AssertionError("x is negative"))


def _graph_of(layer: nn.Module) -> torch.fx.GraphModule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The tensor attributes? self._flat_weights")
        return torch.export.export(layer, (torch.ones(2, 3, 4),)).module()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (nn.LSTM, "aten.lstm.input"),
        (nn.GRU, "aten.gru.input"),
        (nn.RNN, "aten.rnn_tanh.input"),
        (partial(nn.RNN, nonlinearity="relu"), "aten.rnn_relu.input"),
    ],
)
def test_a_recurrent_layer_is_refused_unless_torch_is_set_to_compile_it(
    make: Callable[..., nn.RNNBase], operator: str
) -> None:
    graph = _graph_of(make(4, 4))
    with pytest.raises(Exception, match=f"recurrent layer \\({operator}\\).*allow_rnn is True") as raised:
        check_recurrent(graph)
    assert is_refusal(raised.value)
    assert refusal_text(raised.value) == str(raised.value)
    with torch._dynamo.config.patch(allow_rnn=True):
        check_recurrent(graph)


def test_other_layers_are_not_taken_for_recurrent_ones() -> None:
    check_recurrent(_graph_of(nn.Linear(4, 4)))


def test_what_tracing_changes_is_named() -> None:
    changed = torch.fx.symbolic_trace(nn.MultiMarginLoss(), concrete_args={})
    assert "multi_margin_loss" in changed_by_tracing(changed)
    assert "recurrent layer (aten.lstm.input)" in changed_by_tracing(_graph_of(nn.LSTM(4, 4)))
    assert not changed_by_tracing(_graph_of(nn.Linear(4, 4)))


def test_operators_that_compile_the_functions_they_are_given_are_told_from_others() -> None:
    cond, x = torch.ops.higher_order.cond, torch.ones(2)
    with pytest.raises(Uncompilable, match="cond compiles the functions that it is called with"):
        check_compiles_nothing(cond, (True, torch.sin, torch.cos, (x,)))
    branch = symbolic_trace(nn.Identity())
    check_compiles_nothing(cond, (True, branch, branch, (x,)))  # compiled already: of an exported model
    check_compiles_nothing(torch.vmap, (torch.sin,))
