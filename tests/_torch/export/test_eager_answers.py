from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from partita._torch.export.eager_answers import eager_answers
from partita.capture import capture
from partita.errors import CaptureError


class Asking(nn.Module):
    """Adds zero in a longer way when it is exported, as models do that make a mask only then."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() or torch.compiler.is_compiling():
            return x * 3 / 3
        return x


class Shy(nn.Module):
    """Looks at its data, except where it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and bool((x > 0).all()):
            return x * 2
        return x + x


@functools.lru_cache
def _kept(size: int) -> Tensor:
    return torch.ones(size)


class Keeping(nn.Module):
    """Keeps tensors for later, except where it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return x + torch.ones(3)
        return x + _kept(3)


def test_a_model_that_asks_is_captured_as_it_runs_uncaptured() -> None:
    targets = [node.target for node in capture(Asking(), (torch.ones(2),)).module.graph.nodes]
    assert torch.ops.aten.mul.Tensor not in targets


def test_a_model_that_can_only_be_captured_in_its_export_form_still_is() -> None:
    model, x = Shy(), torch.tensor([1.0, -1.0])
    assert torch.equal(capture(model, (x,)).module(x), model(x))


def test_no_tensor_of_the_trace_is_left_in_a_cache() -> None:
    _kept.cache_clear()
    capture(Keeping(), (torch.zeros(3),))
    assert _kept.cache_info().currsize == 0
    assert type(Keeping()(torch.zeros(3))) is Tensor


def test_a_cache_that_was_filled_before_keeps_what_it_has() -> None:
    _kept.cache_clear()
    before = _kept(3)
    with eager_answers():
        _kept(3)
    assert _kept(3) is before


def test_the_functions_are_put_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    code = torch.compiler.is_compiling.__code__
    with pytest.raises(ZeroDivisionError), eager_answers():
        _ = 1 / torch.compiler.is_compiling()
    assert torch.compiler.is_compiling.__code__ is code
    assert torch.compiler.is_compiling()


def test_code_that_imported_the_question_by_name_is_answered_too() -> None:
    class ByName(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 3 / 3 if is_compiling() or is_exporting() else x

    targets = [node.target for node in capture(ByName(), (torch.ones(2),)).module.graph.nodes]
    assert torch.ops.aten.mul.Tensor not in targets


def test_an_answer_that_somebody_has_put_in_its_place_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = object()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: mine)
    closed = torch.compiler.is_compiling
    with eager_answers():
        assert torch.compiler.is_compiling is closed
        assert closed() is mine


_THEN_COMPILE = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from partita.capture import capture

class Attention(nn.Module):
    def forward(self, x):
        return flex_attention(x, x, x, score_mod=lambda score, b, h, q, k: score + (q - k))

capture(Attention(), (torch.randn(2, 2, 16, 16),), prove=False)
torch.compile(Attention(), backend="eager", fullgraph=True)(torch.randn(1, 1, 128, 16))
"""


@pytest.mark.dear
def test_what_dynamo_meets_first_in_a_capture_compiles_whole_afterwards() -> None:
    """Dynamo keeps what it knows of a function for the process's life: this one has to be new."""
    subprocess.run([sys.executable, "-c", _THEN_COMPILE], check=True, timeout=120)


def test_torch_itself_gets_the_true_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with eager_answers():
        assert not torch.compiler.is_exporting()
        inside = eval(
            "lambda: compiler.is_exporting()", {"compiler": torch.compiler, "__name__": "torch.nn.modules"}
        )
        assert inside()


def test_what_can_not_be_captured_in_either_form_is_an_error() -> None:
    class Looking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(CaptureError, match="Looking"):
        capture(Looking(), (torch.ones(2),))
