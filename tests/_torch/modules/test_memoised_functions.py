from __future__ import annotations

import functools
import gc

import pytest

from partita._torch.modules.memoised_functions import memos


def _double(number: int) -> int:
    return 2 * number


def _among(memo: object) -> bool:
    return any(candidate is memo for candidate in memos())


def test_a_memo_is_found_wherever_it_is_kept() -> None:
    class Holds:
        def __init__(self) -> None:
            self.memo = functools.cache(_double)

    holder = Holds()
    assert _among(holder.memo)
    made_later = functools.lru_cache(maxsize=3)(_double)
    assert _among(made_later)
    assert _among(holder.memo)


def test_objects_are_looked_through_only_where_memos_were_made_or_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    original = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: looked.append(0) or original(*of))
    first = functools.cache(_double)
    assert _among(first)
    before = len(looked)
    assert _among(first)
    assert len(looked) == before
    del first
    second = functools.cache(_double)  # as many as before
    assert _among(second)
    assert len(looked) == before + 1


def test_none_is_kept_alive() -> None:
    class Remembered:
        pass

    memo = functools.cache(lambda: Remembered())
    memo()
    assert _among(memo)
    del memo
    gc.collect()
    assert not any(type(one) is Remembered for one in gc.get_objects())
