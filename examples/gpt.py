"""A small GPT with a tied embedding, trained by two processes that hold half of it each; stopped and resumed.

    torchrun --nproc-per-node 2 examples/gpt.py

It learns to predict the next character of this file. The embedding is used by the first stage and, as the
output layer, by the last one: each has a copy, and partita adds up their gradients, so that they stay equal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import (
    Pipe,
    Schedule1F1B,
    UncutReference,
    keyed_graph,
    load_checkpoint,
    pipeline,
    save_checkpoint,
)

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
LENGTH, WIDTH, HEADS, LAYERS = 32, 64, 4, 4
BATCH, MICROBATCHES = 16, 4
STEPS, STOP_AFTER = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """What every process loads; only the first stage looks at the tokens, only the last at the targets."""
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def train(
    runner: Schedule1F1B | UncutReference, optimizer: torch.optim.Optimizer, steps: range
) -> list[Tensor]:
    """A pipeline and the uncut model are trained by the same lines. The losses, where the last stage is."""
    history = []
    for step in steps:
        tokens, target = batch(step)
        losses: list[Tensor] = []
        runner.step(tokens, target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        history += [torch.stack(losses).mean()] if losses else []
    return history


def cut() -> Pipe:
    """Cut by plan into as many stages as there are processes."""
    example = batch(0)[0][: BATCH // MICROBATCHES]
    return pipeline(make_model(), (example,), stages=dist.get_world_size(), microbatches=MICROBATCHES)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp(prefix="partita-gpt-")]  # in earnest: a path that all hosts can reach
    dist.broadcast_object_list(folders)

    stage = cut().build_stage(rank)  # of the pipe, only this stage stays in memory
    optimizer = optimizer_of(stage.module)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    before = train(schedule, optimizer, range(STOP_AFTER))
    save_checkpoint(folders[0], stage, optimizer)
    schedule.close()

    # Everything is built anew here, as in a job that starts again; it could have another number of stages.
    stage = cut().build_stage(rank)
    optimizer = optimizer_of(stage.module)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn)
    load_checkpoint(folders[0], stage, optimizer)  # with it, dropout goes on where it stopped
    after = train(schedule, optimizer, range(STOP_AFTER, STEPS))
    schedule.close()

    # The proof: the uncut model, trained without a stop, has the same parameters bit for bit.
    whole = keyed_graph(make_model(), (batch(0)[0][: BATCH // MICROBATCHES],))
    expected = train(UncutReference(whole, MICROBATCHES, loss_fn), optimizer_of(whole), range(STEPS))
    state, reference = stage.module.state_dict(), whole.state_dict()
    different = [name for name, value in state.items() if not torch.equal(value, reference[name])]
    if different:
        raise SystemExit(f"rank {rank}: {different} differ from the uncut model's")
    if stage.is_last:
        assert torch.equal(torch.stack(before + after), torch.stack(expected))
        print(f"loss {float(before[0]):.3f} -> {float(after[-1]):.3f}")
    print(f"rank {rank}: {len(state)} tensors equal to the uncut model's, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
