from __future__ import annotations

import dataclasses

from tests.planning.costs.test_spanning import across

from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.spanning import SpanningValue


def test_what_stages_of_a_rank_hand_to_each_other_is_there_once_also_where_others_lie_between() -> None:
    costs, cuts = across(), (0, 1, 2, 3, 4)
    loop = shared_on_rank(costs, cuts, (0, 1, 0, 1))
    assert {one[:4] for one in loop} == {(0, 0, 0, 0)}
    assert [one.sent_values for one in loop] == [((1, 1), (3, 100)), ((2, 1),), ((3, 1),), ()]
    assert [one.handed_gradients for one in loop] == [(), ((0, 1),), ((1, 1),), ((0, 100), (2, 1))]
    ends_together = shared_on_rank(costs, cuts, (0, 1, 1, 0))
    assert [one[:4] for one in ends_together] == [
        (0, 0, 100, 0),
        (0, 0, 1, 0),
        (1, 1, 0, 0),
        (100, 100, 0, 0),
    ]
    assert [one.handed_gradients for one in ends_together] == [
        (),
        ((0, 1),),
        ((1, 1),),
        ((0, 100), (2, 1)),
    ]
    assert costs.messages(3, 3, ends_together[3]) == (1, 1, 0)
    assert costs.messages(0, 0, ends_together[0]) == (0, 0, 1)
    two_users = dataclasses.replace(costs, spanning=(SpanningValue(100, 100, 0, (2, 3), 0),))
    both, one = (shared_on_rank(two_users, cuts, ranks) for ranks in ((0, 1, 0, 0), (0, 1, 0, 2)))
    assert [it[:4] for it in both] == [(0, 0, 100, 0), (0, 0, 0, 0), (100, 100, 101, 0), (101, 101, 0, 0)]
    assert [it.handed_gradients for it in both] == [(), ((0, 1),), ((0, 100), (1, 1)), ((2, 101),)]
    assert [it[:4] for it in one] == [(0, 0, 100, 0), (0, 0, 0, 0), (100, 100, 0, 0), (0, 0, 0, 0)]
    of_input = dataclasses.replace(costs, spanning=(SpanningValue(100, 0, -1, (3,)),))
    assert shared_on_rank(of_input, cuts, (0, 1, 2, 0))[3][:4] == (100, 0, 0, 0)  # sent from the first stage


def test_a_value_is_sent_to_each_stage_that_uses_it_also_where_these_share_a_rank() -> None:
    """What the first of them was sent seemed to serve the other as well."""
    costs = dataclasses.replace(across(), spanning=(SpanningValue(100, 0, 0, (1, 3), 0),))
    apart = shared_on_rank(costs, (0, 1, 2, 3, 4), (0, 1, 2, 1))
    assert apart[3].entering_bytes == 0
    assert apart[0].sent_values == ((1, 101), (3, 100))
