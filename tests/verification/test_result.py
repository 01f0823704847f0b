from __future__ import annotations

import dataclasses
import pickle

import pytest

from partita.errors import VerificationFailed
from partita.verification import Difference, Verification

WRONG = Difference("output", "output['a']", "is 1, not 2", max_abs=1.0)


def test_check_returns_itself_or_raises_with_the_whole_text() -> None:
    good = Verification(True, (), {"outputs": 1})
    assert good.check() is good
    bad = Verification(False, (WRONG,), {"outputs": 1})
    with pytest.raises(
        VerificationFailed, match=r"1 difference\n   1. output\['a'\]: is 1, not 2\n   compared: 1"
    ):
        bad.check()


def test_a_long_list_is_cut_and_says_so() -> None:
    assert "... and 8 more" in str(Verification(False, (WRONG,) * 20))


def test_the_tolerance_is_named() -> None:
    assert str(Verification(True, (), rtol=1e-3)).startswith("equal within rtol=0.001, atol=0\n")


def test_ok_and_differences_must_agree() -> None:
    with pytest.raises(ValueError, match="ok is True, but there are 1 differences"):
        Verification(True, (WRONG,))


def test_a_result_is_frozen_and_travels() -> None:
    result = Verification(False, (WRONG,), {"outputs": 1})
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.ok = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        result.compared["outputs"] = 2  # type: ignore[index]
    assert pickle.loads(pickle.dumps(result)) == result
