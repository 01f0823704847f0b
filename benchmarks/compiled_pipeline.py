"""Does W keep its share when a stage is compiled, what does it keep in memory, and what does compiling take?

``partita bench compiled-pipeline``. The middle stage of three equal ones, uncompiled and compiled, in turn:
F and B of one microbatch, F, I and W of another. W's share is W / (I + W). Bytes are those that are alive
between I and W and were not there before F. Then the time to compile and run a first step of one stage, and
of eight equal ones on two ranks, in new processes, with torch's caches empty, and once more with them full.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from benchmarks.harness import MIN_ROUNDS, Ratio, in_turn, ratio, write_json
from benchmarks.ranks import on_ranks, timed
from partita.pipelining import ScheduleInterleavedZeroBubble, SplitPoint, pipeline
from partita.pipelining.stages.stage import Stage
from partita.runtime import InProcessWorld, ProcessGroupComm

_LIMIT_S = 300.0

__all__ = ["KINDS", "CompileTime", "ShareRow", "main", "middle_stage", "stage_passes"]


class Attention(nn.Module):
    """Of GPT's kind; with ``rotary``, of Llama's."""

    def __init__(self, width: int, *, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = 4, rotary
        self.mix, self.out = nn.Linear(width, 3 * width, bias=not rotary), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        if self.rotary:
            q, k = self._rotated(q), self._rotated(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * 0.1
        first, second = x.chunk(2, -1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
        )


class TransformerBlock(nn.Module):
    def __init__(self, width: int, feed: nn.Module, *, rotary: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if rotary else nn.LayerNorm
        self.first, self.second = norm(width), norm(width)
        self.attention, self.feed = Attention(width, rotary=rotary), feed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A mixture whose experts all run, weighted by a router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, *sizes) * 0.05) for sizes in ((width, width), (width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        hidden = functional.gelu(torch.einsum("bsw,ewh->besh", x, self.up))
        return torch.einsum("besh,ehw,bse->bsw", hidden, self.down, weights)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(h)))


def _feed(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


KINDS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "GPT": (lambda width: TransformerBlock(width, _feed(width)), lambda width: torch.randn(4, 128, width)),
    "Llama": (
        lambda width: TransformerBlock(width, Gated(width), rotary=True),
        lambda width: torch.randn(4, 128, width),
    ),
    "ViT": (lambda width: TransformerBlock(width, _feed(width)), lambda width: torch.randn(8, 50, width)),
    "ResNet": (lambda width: Residual(width // 4), lambda width: torch.randn(8, width // 4, 16, 16)),
    "MoE": (lambda width: TransformerBlock(width, Experts(width)), lambda width: torch.randn(4, 128, width)),
}
"""By name: a block of a width, and an input of it."""


@dataclass(frozen=True)
class ShareRow:
    """One kind of stage. Seconds are medians; the ratios are of one run each.

    Attributes:
        share: W / (I + W) compiled, over the same uncompiled.
        halves: I + W over B, compiled.
        kept: bytes between I and W, compiled and uncompiled.
        speed: F + B uncompiled over compiled.
    """

    kind: str
    backend: str
    uncompiled_s: dict[str, float]
    compiled_s: dict[str, float]
    share: Ratio
    halves: Ratio
    kept: tuple[int, int]
    speed: Ratio


@dataclass(frozen=True)
class CompileTime:
    """Seconds until a first step has ended, in new processes.

    Attributes:
        ranks: how many processes there are.
        stages: how many equal stages they have.
        cached: whether torch's caches on disk are from a run before.
    """

    ranks: int
    stages: int
    cached: bool
    seconds: float


def main(
    *, quick: bool = False, json_path: Path | None = None, console: Console | None = None
) -> list[ShareRow | CompileTime]:
    """Measure every kind of stage and the time to compile, print tables, and write JSON.

    Args:
        quick: two kinds, small, with ``aot_eager``, and no compile time: whether it runs, not how fast.
    """
    console = console or Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kinds = ("GPT", "ResNet") if quick else tuple(KINDS)
        width, backend, rounds = (16, "aot_eager", 1) if quick else (256, "inductor", 2 * MIN_ROUNDS)
        rows: list[ShareRow | CompileTime] = [_measured(kind, width, backend, rounds) for kind in kinds]
    finally:
        torch.set_num_threads(threads)
    table = Table(
        "stage", "W's share, compiled / eager", "(I + W) / B", "kept, compiled / eager", "eager / compiled"
    )
    for row in rows:
        assert isinstance(row, ShareRow)
        kept = row.kept[0] / max(row.kept[1], 1)
        table.add_row(row.kind, str(row.share), str(row.halves), f"{kept:.2f}", str(row.speed))
    console.print(table)
    if not quick:
        times = _compile_times()
        first = {one.stages: one.seconds for one in times if not one.cached}
        again = {one.stages: one.seconds for one in times if one.cached}
        console.print(
            f"compiling 8 equal stages on 2 ranks: {first[8] / first[1]:.2f} x one; "
            f"once more: {again[8] / first[8]:.2f} x"
        )
        rows += times
    write_json(json_path, "compiled_pipeline", rows)
    return rows


def _stage(kind: str, width: int, backend: str | None) -> tuple[Stage, Tensor]:
    torch.manual_seed(0)
    make, example = KINDS[kind]
    x = example(width)
    stage = middle_stage(lambda: make(width), x, backend)
    for parameter in stage.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return stage, x.requires_grad_()


def middle_stage(make: Callable[[], nn.Module], x: Tensor, backend: str | None) -> Stage:
    """The second of three equal stages, alone in this process.

    Args:
        make: makes what each stage runs.
        x: what the first one takes.
        backend: compiles it; None: it stays as it is.
    """
    cuts = {"0": SplitPoint.END, "1": SplitPoint.END}
    pipe = pipeline(nn.Sequential(*(make() for _ in range(3))), (x,), split_spec=cuts, prove=False)
    (comm,) = InProcessWorld(1).run(lambda comm: comm)
    stage = pipe.build_stage(1, comm=comm)
    if backend is not None:
        stage.compile(backend)
    return stage


_PASSES = ("F", "B", "F again", "I", "W")


def stage_passes(stage: Stage, x: Tensor) -> dict[str, float]:
    """Seconds of each pass."""
    (name,), (output,) = stage.border.inputs, stage.border.outputs
    seed = {output: torch.ones_like(x)}
    stage.begin(2)
    actions: tuple[Callable[[], object], ...] = (
        lambda: stage.forward(0, {name: x}, train=True),
        lambda: stage.backward(0, seed),
        lambda: stage.forward(1, {name: x}, train=True),
        lambda: stage.backward_input(1, seed),
        lambda: stage.backward_weight(1),
    )
    seconds = {}
    for label, action in zip(_PASSES, actions, strict=True):
        start = time.perf_counter()
        action()
        seconds[label] = time.perf_counter() - start
    return seconds


def _measured(kind: str, width: int, backend: str, rounds: int) -> ShareRow:
    sides = {"eager": _stage(kind, width, None), "compiled": _stage(kind, width, backend)}
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    runs = {side: (lambda side=side: taken[side].append(stage_passes(*sides[side]))) for side in sides}
    for run in runs.values():
        run()  # compiles
    for one in taken.values():
        one.clear()
    in_turn(runs, rounds=rounds)
    columns = {
        side: {label: [row[label] for row in rows[-rounds:]] for label in _PASSES}
        for side, rows in taken.items()
    }

    def share(side: str) -> list[float]:
        return [w / (i + w) for i, w in zip(columns[side]["I"], columns[side]["W"], strict=True)]

    def total(side: str, *labels: str) -> list[float]:
        return [sum(values) for values in zip(*(columns[side][label] for label in labels), strict=True)]

    medians = {
        side: {label: float(torch.tensor(values).median()) for label, values in by_pass.items()}
        for side, by_pass in columns.items()
    }
    return ShareRow(
        kind,
        backend,
        medians["eager"],
        medians["compiled"],
        ratio(share("compiled"), share("eager")),
        ratio(total("compiled", "I", "W"), columns["compiled"]["B"]),
        (_kept(*sides["compiled"]), _kept(*sides["eager"])),
        ratio(total("eager", "F", "B"), total("compiled", "F", "B")),
    )


def _kept(stage: Stage, x: Tensor) -> int:
    """Bytes that W is waiting with: of all tensors that it holds but parameters."""
    (name,), (output,) = stage.border.inputs, stage.border.outputs
    stage.begin(1)
    stage.forward(0, {name: x}, train=True)
    stage.backward_input(0, {output: torch.ones_like(x)})
    late: Any = stage._late[0]  # noqa: SLF001 - what only the stage knows
    tensors = list(_held(late.__self__))
    stage.backward_weight(0)
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.module.parameters()}
    sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(size for address, size in sizes.items() if address not in own)


def _held(weights: Any) -> Iterator[Tensor]:
    """The tensors that the second half of a backward pass holds."""
    for node in weights._compiled:  # noqa: SLF001 - likewise
        yield from (value for value in node.partita_second.args[1].values() if isinstance(value, Tensor))
    # a root that is no edge is a parameter, whose gradient I has computed
    queue = [root.node for root, _ in weights._roots if isinstance(root, GradientEdge)]  # noqa: SLF001
    yield from (seed for _, seed in weights._roots)  # noqa: SLF001 - likewise
    for catch in weights._catches:  # noqa: SLF001 - likewise
        _, gradients = catch.starts()
        yield from gradients
        yield from _saved(catch.node)
        queue += [child for child, _ in catch.node.next_functions if child is not None]
    # what lies before the nodes that both halves run is freed by then
    for node in queue:
        yield from _saved(node)


def _saved(node: Any) -> Iterator[Tensor]:
    for attribute in dir(node):
        if attribute.startswith("_saved_"):
            with suppress(RuntimeError):  # freed
                value = getattr(node, attribute)
                values = value if isinstance(value, tuple) else (value,)
                yield from (one for one in values if isinstance(one, Tensor))


def _compile_times() -> list[CompileTime]:
    times = []
    for ranks, stages in ((1, 1), (2, 8)):
        with tempfile.TemporaryDirectory() as cache, _environment(TORCHINDUCTOR_CACHE_DIR=cache):
            for cached in (False, True):
                seconds = on_ranks(ranks, _LIMIT_S, _first_step, stages, own_cores=False)
                times.append(CompileTime(ranks, stages, cached, seconds))
    return times


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Let processes that are started in a block have these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _first_step(comm: ProcessGroupComm, count: int) -> float:
    """Seconds from where stages are told to compile to the end of their first step."""
    width = 64
    torch.manual_seed(0)
    make, example = KINDS["GPT"]
    x = example(width).requires_grad_()  # so that the first stage is equal to the others
    cuts = {str(number): SplitPoint.END for number in range(count - 1)}
    pipe = pipeline(nn.Sequential(*(make(width) for _ in range(count))), (x,), split_spec=cuts, prove=False)
    stages = [pipe.build_stage(index, comm=comm) for index in range(comm.rank, count, comm.size)]
    microbatches = 2 * comm.size
    batch = x.detach().repeat(microbatches, 1, 1).requires_grad_()

    def step() -> None:
        for stage in stages:
            stage.compile("inductor")
        schedule = ScheduleInterleavedZeroBubble(stages, microbatches, functional.mse_loss)
        schedule.step(batch, target=torch.zeros_like(batch))

    return timed(comm, step)
