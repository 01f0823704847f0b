"""What the ranks of a planned pipeline hold is what the plan says, from units that were measured alone."""

from __future__ import annotations

import pytest
import torch
from benchmarks.two_ranks import stage_costs
from tests.runtime.worlds import ProcessWorld
from torch import nn

from partita._torch.tensors.live_bytes import LiveBytes
from partita.pipelining import measure_units, pipeline
from partita.planning import Cluster, CostModel, plan_stages, simulate
from partita.planning.generators.plan_schedule import schedule_of
from partita.runtime import Comm

_SCHEDULES = {"1F1B": 4, "Interleaved1F1B": 8, "VHalf": 8}
"""With how many stages each runs on four ranks."""


def _held_and_planned(comm: Comm) -> list[tuple[str, int, int]]:
    """Under each schedule what tensors hold at most in a step beyond parameters and gradients, in bytes, and
    what was planned for it.
    """
    torch.manual_seed(0)
    # Messages are as large as what a stage keeps.
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))
    x, loss_fn = torch.randn(32, 64), nn.functional.mse_loss
    measured = measure_units(model, (x,), loss_fn=loss_fn, target=x)
    costs = CostModel.from_json(comm.all_gather_object(measured.to_json())[0])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    results = []
    for name, stages in _SCHEDULES.items():
        plan = plan_stages(costs, stages, cluster=Cluster(4), schedule=name, microbatches=8)
        schedule = pipeline(model, (x,), plan=plan, prove=False).schedule(loss_fn, comm=comm)
        batch = torch.cat([x] * 8)
        schedule.step(batch, target=batch, return_outputs=False)
        with LiveBytes() as live:
            schedule.step(batch, target=batch, return_outputs=False)
        schedule.close()
        peaks = simulate(schedule_of(plan), stage_costs(costs, plan), Cluster(4)).peak_bytes
        results.append((name, live.most, peaks[comm.rank]))
    return results


@pytest.mark.dear
@pytest.mark.usefixtures("alone")
def test_messages_count_as_the_runtime_holds_them() -> None:
    """Each rank was planned to hold the last two gradients that it had sent and the next two
    messages: of such a model that was up to 6 % off.
    """
    for rank in ProcessWorld(4).run(_held_and_planned):
        for name, held_bytes, planned in rank:
            assert abs(held_bytes / planned - 1.0) < 0.01, name
