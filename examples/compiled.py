"""A transformer whose stages are compiled, under a schedule that splits the backward pass.

    torchrun --nproc-per-node 2 examples/compiled.py

Each process holds two of four equal stages, which are traced and compiled once. With ``aot_eager`` the run is
the uncut eager model's bit for bit; pass ``inductor`` to have it fast, and equal up to rounding.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import ScheduleZBVZeroBubble, SplitPoint, UncutReference, keyed_graph, pipeline
from partita.planning import v_placement

WIDTH, BATCH, MICROBATCHES, STEPS = 32, 8, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def train(runner: ScheduleZBVZeroBubble | UncutReference, modules: list[nn.Module]) -> list[Tensor]:
    """A pipeline and the uncut model are trained by the same lines. The losses, where the last stage is."""
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3)
    history = []
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        losses: list[Tensor] = []
        runner.step(x, target=x.roll(1, 1), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        history += losses
    return history


def main(backend: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    example = (torch.randn(BATCH // MICROBATCHES, WIDTH),)
    cuts = {str(block): SplitPoint.END for block in range(3)}
    pipe = pipeline(make_model(), example, split_spec=cuts, compile=backend)
    placement = v_placement(pipe.num_stages, ranks)
    stages = [pipe.build_stage(index, "cpu") for index, owner in enumerate(placement) if owner == rank]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, functional.mse_loss)
    modules = [stage.module for stage in stages]
    losses = train(schedule, modules)

    whole = keyed_graph(make_model(), example)
    expected = train(UncutReference(whole, MICROBATCHES, functional.mse_loss), [whole])
    state: dict[str, torch.Tensor] = {}
    reference = whole.state_dict()
    for module in modules:
        state |= module.state_dict()
    exact = backend == "aot_eager"
    for name, value in state.items():
        torch.testing.assert_close(
            value, reference[name], rtol=0 if exact else 1e-2, atol=0 if exact else 1e-4
        )
    if losses:
        print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}, uncut {float(expected[-1]):.3f}")
    how = ", bit for bit" if exact else " but for rounding"
    print(f"rank {rank}: {len(state)} tensors equal to the uncut model's{how}")
    schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "aot_eager")
