from __future__ import annotations

from dataclasses import replace

from partita.planning import StageCost, get_schedule
from partita.planning.searching.orders.beside import Beside, RowsInMemory
from partita.planning.searching.orders.clock import rows_of
from partita.planning.searching.orders.row_memory import row_kinds
from partita.planning.simulating.message_sizes import handed_on_ranks, message_sizes
from partita.planning.simulating.messages import messages_beside

COSTS = [
    StageCost(
        1.0,
        2.0,
        arriving_bytes=4 * min(stage, 1),
        arriving_gradient_bytes=3,
        returned_gradient_bytes=3 * min(stage, 1),
        handed_gradients=((0, 5),) if stage == 3 else (),
    )
    for stage in range(4)
]


def beside(costs: list[StageCost]) -> Beside:
    schedule = get_schedule("ZBVZeroBubble")(4, 4, 2)
    rows, ranks = rows_of(schedule), schedule.stage_ranks
    placed = [[(kind, stage, number % 4) for kind, stage, number in row] for row in rows]
    sizes = message_sizes(costs, ranks)
    messages = messages_beside(placed, ranks, sizes.coming)
    in_memory = RowsInMemory(placed, list(map(row_kinds, rows)), messages)
    return Beside(in_memory, sizes, handed_on_ranks(costs, ranks))


def test_what_one_stage_sends_changes_the_key_where_it_changes_the_bytes() -> None:
    before = beside(COSTS)
    for number, cost in enumerate(COSTS):
        changes = [
            replace(cost, arriving_bytes=9),
            replace(cost, arriving_gradient_bytes=9),
            replace(cost, returned_gradient_bytes=9),
            replace(cost, handed_gradients=((0, 9),) if number == 3 else ()),
        ]
        for changed in changes:
            after = beside([*COSTS[:number], changed, *COSTS[number + 1 :]])
            for rank in range(2):
                same_key = before.key_of(rank) == after.key_of(rank)
                assert same_key == (before.bytes_on(rank) == after.bytes_on(rank))
