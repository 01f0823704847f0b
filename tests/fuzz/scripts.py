"""Random training scripts for two processes (`tests.fuzz.running_scripts` runs them).

A script is drawn from a seed: the model, where it is cut and how, the schedule, and what happens in each step
(batches of other sizes, accumulated gradients, autocast, a scaler, clipping, evaluations, modes, a checkpoint
from which another cut goes on).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tests.cudagraphs.capturing import AllWorthIt
from tests.fuzz.script_models import BLOCKS, LENGTH, VOCABULARY, ScriptModel
from torch import Tensor
from torch.nn import functional

from partita.cudagraphs import CudaGraphsRunner
from partita.pipelining import Pipe, SplitPoint, pipeline

__all__ = ["OPTIMIZERS", "Cut", "Script", "Step"]

PLACEMENTS: dict[tuple[int, ...], tuple[str, ...]] = {
    (0, 1): ("GPipe", "1F1B", "ZBH1", "ZBH2", "ZB2p"),
    (0, 1, 0, 1): ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"),
    (0, 1, 1, 0): ("ZBVZeroBubble", "DualPipeV", "VHalf", "VMin"),
}
COMPILERS = ("", "", "", "aot_eager", "recorded")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.02),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
}


@dataclass(frozen=True)
class Cut:
    """A schedule, where its stages run, and the blocks that a stage ends with."""

    schedule: str
    placement: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def drawn(cls, draw: random.Random, blocks: int) -> Cut:
        """One that fits a model of so many blocks."""
        placement = draw.choice([it for it in PLACEMENTS if len(it) <= blocks])
        ends = sorted(draw.sample(range(blocks - 1), len(placement) - 1)) if blocks > 2 else [0]
        return cls(draw.choice(PLACEMENTS[placement]), placement, tuple(ends))


@dataclass(frozen=True)
class Step:
    """What happens in one step.

    Attributes:
        samples: of each microbatch.
        further: samples that the first few microbatches have one each of.
        calls: of ``schedule.step`` before the optimizer's.
        evaluates: whether a batch is evaluated afterwards.
        in_eval_mode: whether it trains in evaluation mode.
        weighted: whether the losses have weights.
        by_hand: whether the script cuts the batch, into microbatches of different sizes.
        keeps_outputs: whether the schedule returns them.
        resumes: whether training goes on in the other cut afterwards, from a checkpoint.
    """

    samples: int
    further: int
    calls: int
    evaluates: bool
    in_eval_mode: bool
    weighted: bool
    by_hand: bool
    keeps_outputs: bool
    resumes: bool

    @classmethod
    def drawn(cls, draw: random.Random) -> Step:
        """Any."""
        return cls(
            samples=draw.choice((2, 2, 3)),
            further=draw.choice((0, 0, 1)),
            calls=draw.choice((1, 1, 2)),
            evaluates=draw.random() < 0.4,
            in_eval_mode=draw.random() < 0.2,
            weighted=draw.random() < 0.2,
            by_hand=draw.random() < 0.2,
            keeps_outputs=draw.random() < 0.7,
            resumes=draw.random() < 0.4,
        )


@dataclass(frozen=True)
class Script:
    """A training script; see `Step` and `Cut`."""

    seed: int
    blocks: tuple[str, ...]
    tied: bool
    skip: bool
    again: bool
    own_loss: bool
    scale: bool
    dtype: torch.dtype
    frontend: str
    compiler: str
    recompute: bool | list[Any] | None
    cuts: tuple[Cut, Cut]
    microbatches: int
    optimizer: str
    clip: float | None
    scaled: bool
    autocast: bool
    steps: tuple[Step, ...]

    @classmethod
    def drawn(cls, seed: int) -> Script:
        """That of a seed."""
        draw = random.Random(seed)
        blocks = tuple(draw.choice(list(BLOCKS)) for _ in range(draw.randint(2, 6)))
        microbatches = draw.choice((4, 5, 6))
        dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.bfloat16))
        frontend = draw.choice(("export", "export", "modules"))
        compiler = draw.choice(COMPILERS) if frontend == "export" else ""
        # autocast in two stages sums the gradients of both uses in their own precision
        again = draw.random() < 0.15
        return cls(
            seed=seed,
            blocks=blocks,
            tied=draw.random() < 0.4,
            skip=draw.random() < 0.3,
            again=again,
            own_loss=draw.random() < 0.4,
            scale=draw.random() < 0.3,
            dtype=dtype,
            frontend=frontend,
            compiler=compiler,
            recompute=draw.choice((None, None, True, [1], [1] if frontend == "modules" else ["blocks.*"])),
            cuts=(Cut.drawn(draw, len(blocks)), Cut.drawn(draw, len(blocks))),
            microbatches=microbatches,
            optimizer=draw.choice(list(OPTIMIZERS)),
            clip=draw.choice((None, 0.05, 1.0)),
            scaled=draw.random() < 0.2,
            autocast=not again and draw.random() < 0.2,
            steps=tuple(Step.drawn(draw) for _ in range(3)),
        )

    def model(self) -> ScriptModel:
        """Its model, with the same weights each time."""
        torch.manual_seed(self.seed)
        # stages of the model's own code draw as they are cut, so no uncut model draws the same
        dropout = 0.0 if self.frontend == "modules" else 0.3
        switches = {"tied": self.tied, "skip": self.skip, "again": self.again, "own_loss": self.own_loss}
        return ScriptModel(self.blocks, dropout=dropout, **switches).to(self.dtype)

    def batch(self, samples: int, number: int) -> tuple[Tensor, dict[str, Any], Tensor]:
        """Tokens, keyword arguments and the target of a batch."""
        draw = torch.Generator().manual_seed(1000 * self.seed + number)
        tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=draw)
        target = torch.randint(VOCABULARY, (samples, LENGTH), generator=draw)
        named: dict[str, Any] = {"labels": target} if self.own_loss else {}
        if self.scale:
            named["scale"] = torch.rand(samples, 1, 1, generator=draw).to(self.dtype) + 0.5
        return tokens, named, target

    def loss_fn(self) -> Callable[..., Tensor] | None:
        """What schedules are given."""
        if self.own_loss:
            return None
        return lambda logits, target: functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    def precision(self) -> AbstractContextManager[object]:
        """Around each call of a schedule."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def pipe(self, cut: Cut) -> Pipe:
        """The model, cut."""
        tokens, named, _ = self.batch(2, 0)
        first = "blocks.0@0" if self.again and self.frontend == "export" else "blocks.0"
        names = [f"blocks.{number}" if number else first for number in cut.ends]
        spec = dict.fromkeys(names, SplitPoint.END)
        options: dict[str, Any] = {"frontend": self.frontend, "split_spec": spec}
        if self.compiler == "recorded":
            options["compile"] = CudaGraphsRunner(recorder="replay", saving=AllWorthIt())
        elif self.compiler:
            options["compile"] = self.compiler
        if self.recompute is not None:
            options["recompute"] = self.recompute
        with self.precision():
            return pipeline(self.model(), (tokens,), named, **options)
