"""A residual network cut, placed and scheduled by a search, for the memory that a rank has.

    torchrun --nproc-per-node 2 examples/planned.py

What each process holds, when it does what and what it computes a second time follow from costs that all
processes measure together. None of that changes a bit of what is learnt: the run is compared with the uncut
model's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import UncutReference, keyed_graph, pipeline
from partita.pipelining.schedules import PipelineSchedule

WIDTH, BLOCKS = 64, 8
BATCH, MICROBATCHES, STEPS = 32, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(functional.gelu(self.up(self.norm(x)))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def train(runner: PipelineSchedule | UncutReference, modules: list[nn.Module]) -> list[Tensor]:
    """A pipeline and the uncut model are trained by the same lines. The losses, where the last stage is."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    history = []
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        losses: list[Tensor] = []
        runner.step(x, target=x.roll(1, 1), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        history += losses
    return history


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    example = (torch.randn(BATCH // MICROBATCHES, WIDTH),)
    pipe = pipeline(make_model(), example, plan="auto", microbatches=MICROBATCHES, memory_limit="64MB")
    schedule = pipe.schedule(functional.mse_loss)
    if rank == 0 and (plan := pipe.plan) is not None:
        again = {stage.index: stage.recompute for stage in plan.stages if stage.recompute}
        print(f"{plan.schedule}: stages on ranks {plan.placement}, recomputed units {again}")
    modules = [stage.module for stage in schedule.stages.values()]
    losses = train(schedule, modules)

    whole = keyed_graph(make_model(), example)
    expected = train(UncutReference(whole, MICROBATCHES, functional.mse_loss), [whole])
    state: dict[str, torch.Tensor] = {}
    reference = whole.state_dict()
    for module in modules:
        state |= module.state_dict()
    different = [name for name, value in state.items() if not torch.equal(value, reference[name])]
    if different:
        raise SystemExit(f"rank {rank}: {different} differ from the uncut model's")
    if losses:
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
    print(f"rank {rank}: {len(state)} tensors equal to the uncut model's, bit for bit")
    schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
