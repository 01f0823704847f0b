"""A U-Net, cut so that its skip connections cross stages, trained to clean noisy pictures.

    torchrun --nproc-per-node 2 examples/unet.py

The first half of the network hands three tensors to the second: what goes through the bottom, and two skips.
A value goes straight from the stage that makes it to the one that uses it: try four processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import Schedule1F1B, SplitPoint, UncutReference, pipeline

SIZE, BATCH, MICROBATCHES, STEPS = 16, 8, 4, 4
CUTS = {2: ["bottom"], 4: ["down.1", "bottom", "up.1"]}


class Convolutions(nn.Sequential):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
            nn.BatchNorm2d(channels_out),  # its running statistics are kept by the stage that holds it
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
            nn.ReLU(),
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Convolutions(1, 8), Convolutions(8, 16)])
        self.bottom = Convolutions(16, 16)
        self.up = nn.ModuleList([Convolutions(32, 8), Convolutions(16, 8)])
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, skips.pop()], 1))
        return self.out(x)


def make_model() -> UNet:
    torch.manual_seed(0)
    return UNet()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of discs, and the discs."""
    generator = torch.Generator().manual_seed(step)
    centre = SIZE * torch.rand(BATCH, 1, 2, 1, 1, generator=generator)
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    clean = ((grid - centre).square().sum(2) < 16).float()
    return clean + 0.3 * torch.randn(clean.shape, generator=generator), clean


def train(runner: Schedule1F1B | UncutReference, module: nn.Module) -> list[Tensor]:
    """The mean loss of each step, where the last stage is."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step in range(STEPS):
        noisy, clean = batch(step)
        losses: list[Tensor] = []
        runner.step(noisy, target=clean, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        history += [torch.stack(losses).mean()] if losses else []
    return history


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks not in CUTS:
        raise SystemExit(f"this example knows where to cut for {sorted(CUTS)} processes, not {ranks}")

    # Cut by hand: a stage begins at each of these modules.
    example = (batch(0)[0][: BATCH // MICROBATCHES],)
    spec = dict.fromkeys(CUTS[ranks], SplitPoint.BEGINNING)
    pipe = pipeline(make_model(), example, split_spec=spec)
    if rank == 0:
        print(pipe)  # the stages, and what crosses between them
    stage = pipe.build_stage(rank)
    del pipe  # the rank keeps its own stage only
    schedule = Schedule1F1B(stage, MICROBATCHES, functional.mse_loss)
    history = train(schedule, stage.module)

    stage.module.eval()  # the pipeline follows train() and eval() as the model does
    cleaned = schedule.eval(batch(STEPS)[0])
    schedule.close()

    # The proof: the uncut model, trained on the same microbatches.
    whole = make_model()
    reference = UncutReference(whole, MICROBATCHES, functional.mse_loss)
    expected = train(reference, whole)
    whole.eval()
    expected_cleaned = reference.eval(batch(STEPS)[0])
    state = stage.module.state_dict()
    different = [
        name
        for name, value in whole.state_dict().items()
        if name in state and not torch.equal(state[name], value)
    ]
    if different:
        raise SystemExit(f"rank {rank}: {different} differ from the uncut model's")
    if stage.is_last:
        assert torch.equal(torch.stack(history), torch.stack(expected))
        assert torch.equal(cleaned, expected_cleaned)
        print(f"loss {float(history[0]):.3f} -> {float(history[-1]):.3f}")
    print(f"rank {rank}: {len(state)} tensors equal to the uncut model's, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
