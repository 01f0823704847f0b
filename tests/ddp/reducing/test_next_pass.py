"""Which backward passes are reduced."""

from __future__ import annotations

import pytest

from partita.ddp.reducing.next_pass import NextPass

SYNC, NO_SYNC = (True, True), (False, True)
ALONE, ALONE_NO_SYNC = (True, False), (False, False)
"""In evaluation."""


@pytest.mark.parametrize(
    ("passes", "synced"),
    [
        ([], True),
        ([SYNC], True),
        ([NO_SYNC], False),
        ([NO_SYNC, SYNC], True),
        ([SYNC, NO_SYNC], True),
        ([ALONE, NO_SYNC], False),
        ([NO_SYNC, ALONE], False),
        ([ALONE_NO_SYNC, SYNC], True),
        ([ALONE_NO_SYNC], False),
        ([ALONE_NO_SYNC, ALONE], True),
    ],
)
def test_passes_in_training_mode_decide_and_others_where_there_are_none(
    passes: list[tuple[bool, bool]], synced: bool
) -> None:
    following = NextPass()
    for sync, trains in passes:
        following.forward_begins(sync=sync, trains=trains)
    assert following.synced == synced


def test_a_pass_that_no_forward_pass_came_before_is_as_the_last_one() -> None:
    following = NextPass()
    following.forward_begins(sync=False, trains=True)
    following.begins()
    assert not following.synced
    following.begins()
    assert not following.synced
    following.forward_begins(sync=True, trains=False)
    assert following.synced
