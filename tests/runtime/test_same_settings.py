"""What ranks have to be given alike."""

from __future__ import annotations

import pytest

from partita.errors import SignatureMismatch
from partita.runtime import Comm, InProcessWorld
from partita.runtime.same_settings import check_same, digest, short_digest


def test_the_first_difference_is_named_on_every_rank_and_nothing_ends() -> None:
    def body(comm: Comm) -> str:
        with pytest.raises(SignatureMismatch) as caught:
            check_same(comm, {"initial": "'check'", "plan": str(comm.rank // 2), "seed": str(comm.rank)})
        check_same(comm, {"plan": "0"})
        return str(caught.value)

    messages = InProcessWorld(3).run(body)
    assert messages[0].startswith("seed is 0 on rank 0 and 1 on rank 1: make them equal")
    assert messages == [messages[0]] * 3


def test_a_name_that_one_rank_lacks_is_a_difference() -> None:
    def body(comm: Comm) -> None:
        check_same(comm, {"seed": "0"} if comm.rank else {})

    with pytest.raises(SignatureMismatch, match="seed is left out on rank 0 and 0 on rank 1"):
        InProcessWorld(2).run(body)


def test_digests_tell_texts_apart_and_are_the_same_in_every_process() -> None:
    assert digest("one") == 3815355558890182089
    assert digest("one") != digest("two")
    assert len(short_digest("one", 6)) == 6
    assert short_digest("one", 16).startswith(short_digest("one", 6))
