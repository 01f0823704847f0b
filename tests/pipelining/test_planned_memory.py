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


class _Chain(nn.Sequential):
    """Messages are as large as what a stage keeps."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))


class _Skips(nn.Module):
    """The first half of the layers hands what it makes to the second half as well, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.down:
            x = nn.functional.gelu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = nn.functional.gelu(layer(x)) * skips.pop()
        return x


def _held_and_planned(comm: Comm, model_kind: type[nn.Module]) -> list[tuple[str, int, int]]:
    """Under each schedule what tensors hold at most in a step beyond parameters and gradients, in bytes, and
    what was planned for it.
    """
    torch.manual_seed(0)
    model = model_kind()
    x, loss_fn = torch.randn(32, 64), nn.functional.mse_loss
    measured = measure_units(model, (x,), loss_fn=loss_fn, target=x, stages=8)
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
    for rank in ProcessWorld(4).run(_held_and_planned, _Chain):
        for name, held_bytes, planned in rank:
            assert abs(held_bytes / planned - 1.0) < 0.01, name


@pytest.mark.dear
@pytest.mark.usefixtures("alone")
def test_so_do_messages_that_go_past_stages() -> None:
    """They were planned as messages between neighbours."""
    for rank in ProcessWorld(4).run(_held_and_planned, _Skips):
        for name, held_bytes, planned in rank:
            assert abs(held_bytes / planned - 1.0) < 0.03, (name, held_bytes / planned)
