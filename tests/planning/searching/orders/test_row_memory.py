from __future__ import annotations

from operator import add
from random import Random

import pytest

from partita.planning import StageCost, get_schedule, simulate
from partita.planning.searching.orders.clock import rows_of
from partita.planning.searching.orders.row_memory import peak_of, row_kinds
from partita.planning.simulating.message_sizes import handed_beside, handed_on_ranks, message_sizes
from partita.planning.simulating.messages import links_of_neighbours, messages_beside


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "VMin", "ForwardOnly"])
def test_the_peak_of_a_row_is_what_the_simulator_says(name: str) -> None:
    random = Random(3)
    schedule = get_schedule(name)(6 if name != "ForwardOnly" else 3, 5, 3)
    rows, microbatches = rows_of(schedule), schedule.microbatches
    placed = [[(kind, stage, number % microbatches) for kind, stage, number in row] for row in rows]
    links = links_of_neighbours(schedule.stage_ranks, range(1, schedule.stages))
    messages = messages_beside(placed, schedule.stage_ranks, links)
    of_rows = list(map(row_kinds, rows))
    for _ in range(20):
        costs = [
            StageCost(
                1.0,
                2.0,
                activation_bytes=random.randint(0, 9),
                weight_activation_bytes=random.randint(0, 12),
                static_bytes=random.randint(0, 5),
                forward_workspace_bytes=random.randint(0, 7),
                backward_workspace_bytes=random.randint(0, 7),
                recompute_bytes=random.randint(0, 7),
                arriving_bytes=random.randint(0, 7),
                arriving_gradient_bytes=random.randint(0, 7),
                returned_gradient_bytes=random.randint(1, 7),
                handed_gradients=tuple(
                    (to, random.randint(0, 9)) for to in range(stage) if schedule.stage_ranks[to] == rank
                ),
            )
            for stage, rank in enumerate(schedule.stage_ranks)
        ]
        sizes = message_sizes(costs, schedule.stage_ranks)
        handed = handed_on_ranks(costs, schedule.stage_ranks)
        peaks = []
        for rank, row in enumerate(placed):
            own = {stage: costs[stage] for stage, at in enumerate(schedule.stage_ranks) if at == rank}
            waiting = handed_beside(row, handed[rank] if of_rows[rank].trains else ())
            beside = list(map(add, sizes.beside(messages[rank], len(row)), waiting))
            peaks.append(peak_of(of_rows[rank], own, beside))
        assert tuple(peaks) == simulate(schedule, costs).peak_bytes
