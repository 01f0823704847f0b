"""Exceptions and printed text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.verification.nets import X, assert_only, raising

from partita.verification import verify


def test_exceptions_must_be_of_the_same_type() -> None:
    result = verify(raising(ValueError("no")), raising(ValueError("no")), (X,)).check()
    assert result.raised == "ValueError in forward: no"
    assert "up to the exception that both raise: ValueError in forward: no" in str(result)
    assert_only(verify(raising(TypeError("no")), raising(ValueError("no")), (X,)), "exception", "exception")
    assert_only(
        verify(raising(ValueError("other")), raising(ValueError("no")), (X,)), "exception", "exception"
    )
    assert verify(raising(ValueError("no\n\nWhile executing f")), raising(ValueError("no")), (X,)).ok


def test_raising_where_the_other_returns_is_reported() -> None:
    for pair in (
        (raising(ValueError("no")), lambda x: x.add_(1)),
        (lambda x: x.add_(1), raising(ValueError("no"))),
    ):
        result = verify(*pair, (X,))
        assert result.raised is None
        assert result.differences[0].kind == "exception"
        assert "ValueError in forward: no" in str(result)


def test_what_was_changed_before_the_exception_is_compared() -> None:
    def early(x: torch.Tensor) -> None:
        raise ValueError("no")

    assert_only(verify(early, raising(ValueError("no")), (X,)), "input", "args[0]")


def test_an_exception_in_the_backward_is_compared_too() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ValueError("no way back")

    x = X.clone().requires_grad_()
    assert verify(Failing.apply, Failing.apply, (x,)).raised == "ValueError in backward: no way back"
    assert verify(Failing.apply, torch.clone, (x,)).differences[0].kind == "exception"


def test_text_printed_in_another_order_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    def say(*words: str) -> Callable[[], None]:
        return lambda: [print(word) for word in words] and None  # noqa: T201

    assert verify(say("a", "b"), say("a", "b"), ()).ok
    result = verify(say("b", "a"), say("a", "b"), ())
    assert_only(result, "printed text", "printed line 1")
    assert r"is 'b\n', not 'a\n'" in str(result)
    assert "is missing" in str(verify(say("a"), say("a", "b"), ()))
    assert capsys.readouterr().out == ""


def test_what_torch_logs_on_one_side_is_not_what_the_model_prints() -> None:
    """Since torch 2.14 its logs follow ``sys.stderr``: a first compilation that warned was a difference."""
    log = logging.getLogger("torch._dynamo")
    assert verify(lambda: log.warning("compiled"), lambda: None, ()).ok
