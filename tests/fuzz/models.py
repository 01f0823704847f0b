"""Strategies: random models of pictures whose values and gradients lie oddly in memory, that have backward
passes of their own (`tests.fuzz.functions`) and branch on data; where to cut them, and how to run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from tests.fuzz.functions import FUNCTIONS
from torch import Tensor, nn
from torch.nn import functional

from partita.pipelining import pipe_split
from partita.planning import loop_placement, v_placement

__all__ = ["CHANNELS", "LOSSES", "PLACEMENTS", "SIDE", "Program", "RandomModel", "programs"]

CHANNELS, SIDE = 4, 5

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "pointwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 1),
    "widen": lambda: nn.Conv2d(CHANNELS, 2 * CHANNELS, 1),
    "batch_norm": lambda: nn.BatchNorm2d(CHANNELS),
    "group_norm": lambda: nn.GroupNorm(2, CHANNELS),
    "layer_norm": lambda: nn.LayerNorm(SIDE),
    "linear": lambda: nn.Linear(CHANNELS, CHANNELS),
    "cat": lambda: nn.Conv2d(2 * CHANNELS, CHANNELS, 1),
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "transpose": lambda x: x.transpose(2, 3),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(),
    "every_other": lambda x: torch.cat([x, 2 * x], 3)[..., ::2],
    "second_half": lambda x: torch.cat([x, x.cos()], 0)[x.shape[0] :],
    "later_channels": lambda x: torch.cat([x, x.sin()], 1)[:, 2 : 2 + CHANNELS],
    "expand_channels": lambda x: x.mean(1, keepdim=True).expand(-1, CHANNELS, -1, -1),
    "expand_rows": lambda x: x.amax(2, keepdim=True).expand(-1, -1, SIDE, -1),
    "windows": lambda x: functional.pad(x, (1, 1)).unfold(3, 3, 1),
    "bfloat16": lambda x: x.bfloat16(),
    "pooled": lambda x: x * x.mean((2, 3), keepdim=True),
    "softmax": lambda x: x.softmax(1),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "flip": lambda x: x.flip(1),
    "constant": lambda x: (x.detach() > 0).to(torch.int64),
}
BRANCHES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    # from what is computed, and the model's input
    "asks the input": lambda x, given: x * 2 if (given.mean((1, 2, 3)) > 0).all() else x.sin(),
    "skips": lambda x, given: x if given[:, 0].sum() > 0 else x.cumsum(2) * given,
    "asks what it computes": lambda x, _: x.tanh() if (x.detach().abs() < 3).all() else x / 8,
    "guards": lambda x, _: x if torch.isfinite(x.detach()).all() else x.nan_to_num(),
}
MOST_BRANCHES = 2
MODES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    # from whether the model is in training
    "another way in training": lambda x, training: x.tanh() if training else x.sin(),
    "another number in training": lambda x, training: x * (0.5 if training else 2.0),
    "the same another way": lambda x, training: x.cos() if training else torch.cos(x),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "multiply": torch.mul,
    "matmul": torch.matmul,
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda out, _: out.mean(),
    "squares": lambda out, _: out.square().mean(),
    "a slice": lambda out, _: out[:, 1:, ::2].sum(),
    "target": functional.mse_loss,
}
PLACEMENTS = {
    "GPipe": (0, 1, 2, 3),
    "1F1B": (0, 1, 2, 3),
    "LoopedBFS": loop_placement(4, 2),
    "Interleaved1F1B": loop_placement(4, 2),
    "InterleavedZeroBubble": loop_placement(4, 2),
    "ZBH1": (0, 1, 2, 3),
    "ZBH2": (0, 1, 2, 3),
    "ZB2p": (0, 1, 2, 3),
    "ZBVZeroBubble": v_placement(4, 2),
    "VHalf": v_placement(4, 2),
    "VMin": v_placement(4, 2),
    "DualPipeV": v_placement(4, 2),
}


@dataclass(frozen=True)
class Program:
    """A model and a way of running it.

    Attributes:
        ops: of each what it does, and which values it takes.
        cuts: after which ops.
        loss: one of `LOSSES`.
        schedule: its name.
        placement: the rank of each stage.
        wants_input: whether the input's gradient is wanted.
    """

    ops: tuple[tuple[str, tuple[int, ...]], ...]
    cuts: frozenset[int]
    loss: str
    schedule: str
    placement: tuple[int, ...]
    wants_input: bool


@st.composite
def programs(draw: st.DrawFn) -> Program:
    count = draw(st.integers(4, 9))
    ops = []
    for position in range(count):
        kinds = [*LAYERS, *UNARY, *BINARY, *FUNCTIONS, *MODES]
        if sum(kind in BRANCHES for kind, _ in ops) < MOST_BRANCHES:
            kinds += BRANCHES
        kind = draw(st.sampled_from(kinds))
        # values near the end are taken more often, so that most of them are used
        operand = st.integers(max(0, position - 2), position) | st.integers(0, position)
        ops.append((kind, tuple(draw(operand) for _ in range(2 if kind in ("cat", *BINARY) else 1))))
    schedule = draw(st.sampled_from([*PLACEMENTS]))
    stages = draw(st.integers(2, 4)) if schedule in ("GPipe", "1F1B") else 4
    cuts = draw(st.permutations(range(count - 1)))[: stages - 1]
    placement = tuple(PLACEMENTS[schedule])[:stages]
    loss = draw(st.sampled_from([*LOSSES]))
    return Program(tuple(ops), frozenset(cuts), loss, schedule, placement, draw(st.booleans()))


class RandomModel(nn.Module):
    """Runs a program; value 0 is made of the input. What an op takes is made a picture of numbers where it is
    taken, so that windows that overlap, bfloat16 and integers cross borders too.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleDict(
            {str(number): LAYERS[kind]() for number, (kind, _) in enumerate(program.ops) if kind in LAYERS}
        )
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.last = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for number, (kind, operands) in enumerate(self.program.ops):
            taken = [_picture(values[operand]) for operand in operands]
            if kind in BRANCHES:
                taken.append(x.detach())
            values.append(self._apply(number, kind, *taken))
            if number in self.program.cuts:
                pipe_split()
        return self.last(_picture(values[-1]))

    def _apply(self, number: int, kind: str, x: Tensor, y: Tensor | None = None) -> Tensor:
        if kind in UNARY:
            return UNARY[kind](x)
        if kind in FUNCTIONS:
            return FUNCTIONS[kind](x)
        if kind in MODES:
            return MODES[kind](x, self.training)
        if kind in BINARY or kind in BRANCHES:
            assert y is not None
            return (BINARY | BRANCHES)[kind](x, y)
        layer = self.layers[str(number)]
        if kind == "widen":
            return layer(x).chunk(2, 1)[number % 2]
        if kind == "linear":
            return layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return layer(torch.cat([x, y], 1)) if y is not None else layer(x)


def _picture(value: Tensor) -> Tensor:
    value = value if value.dtype == torch.float32 else value.float()
    return value.mean(-1) if value.dim() == 5 else value
