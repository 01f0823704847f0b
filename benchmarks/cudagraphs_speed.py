"""How long does a step of a small-batch transformer take on a GPU, against torch's own ways to save launches?

``partita bench cudagraphs_speed``. On a CUDA device; CUDA events around each step, all sides in turn,
medians. Four cases: forward and training step, each of the model as it is and with one operation on the CPU
in its middle. Sides: eager; Inductor; Inductor with CUDA graphs, of the partitions of a graph
(``graph_partition``, its default) and of whole graphs only; partita, recording the operators as they are, and
recording what Inductor makes of them. The floor is the sum of the times of all kernels of an eager step, from
torch's profiler. ``--only 'training step, one CPU op/*partita*'`` measures some sides of some cases.

``--quick`` without a GPU runs eager and partita's regions with `ReplayRecorder`, to see whether it runs:
those figures mean nothing.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # documented, and not in its __all__
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Ratio, chosen_cells, first_line, ratio, write_json
from partita.cudagraphs import CudaGraphsBackend
from partita.errors import UsageError

__all__ = ["Case", "Side", "SpeedRow", "Transformer", "inductor_graphs", "main", "measure"]

_WIDTH, _HEADS, _LAYERS, _BATCH, _TOKENS = 512, 8, 12, 2, 64
_ROUNDS, _WARM_UP = 200, 8
_TOLERANCE = 2e-2
"""Inductor fuses, and its matrix products may be other ones: no side is compared bit for bit here."""


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        train: forward, backward and an optimizer step; else forward without gradients.
        host: one operation on the CPU in the middle.
    """

    train: bool
    host: bool

    def __str__(self) -> str:
        return f"{'training step' if self.train else 'forward'}{', one CPU op' if self.host else ''}"


@dataclass(frozen=True)
class Side:
    """One way to run it.

    Attributes:
        compile: from a model to what is called.
        regions: from the number of partitions that Inductor has made meanwhile to that of the regions.
    """

    name: str
    compile: Callable[[nn.Module], Any]
    regions: Callable[[int], int | None] = lambda _partitions: None


@dataclass(frozen=True)
class SpeedRow:
    """One side of one case.

    Attributes:
        milliseconds: median of a step; None where it could not run, see ``problem``.
        spread: the 10th and the 90th of a hundred.
        gain: of eager's time over this one's, round by round.
        over_inductor: of plain Inductor's time over this one's.
        floor: milliseconds of the kernels of one eager step, without launches.
        regions: that partita records; or parts that Inductor has cut graphs into, recorded or not (0: none
            was cut, or all came from its cache).
        problem: why there is no figure, or an empty string.
    """

    case: str
    side: str
    milliseconds: float | None
    spread: tuple[float, float] | None
    gain: Ratio | None
    over_inductor: Ratio | None
    floor: float | None
    regions: int | None
    problem: str = ""


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Blocks, and in their middle perhaps a number that comes from the CPU."""

    def __init__(self, width: int, heads: int, layers: int, *, host: bool) -> None:
        super().__init__()
        self.host = host
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.host and number == len(self.blocks) // 2:
                scale = torch.tanh(x.detach().mean().cpu())
                x = x * (1 + scale.to(x.device))
            x = block(x)
        return self.head(x)


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    console: Console | None = None,
    only: Sequence[str] = (),
) -> list[SpeedRow]:
    """Measure every side of every case, print a table a case, and write JSON where a path is given.

    Args:
        quick: a tiny model and few rounds: whether it runs, not how fast.
        only: patterns of the cells to measure, ``case/side``.

    Raises:
        UsageError: there is no CUDA device, and this is not the quick run; or a pattern matches no cell.
    """
    console = console or Console()
    if not torch.cuda.is_available() and not quick:
        raise UsageError("this benchmark needs a CUDA device: --quick tries its code without one")
    rows: list[SpeedRow] = []
    cases = {
        str(case): case for train in (False, True) for host in (False, True) for case in [Case(train, host)]
    }
    names = [side.name for side in _sides(_device())]
    sides: dict[str, list[str]] = {}
    for cell in chosen_cells([f"{case}/{side}" for case in cases for side in names], only):
        case_name, _, side_name = cell.partition("/")
        sides.setdefault(case_name, []).append(side_name)
    for case_name, side_names in sides.items():
        case = cases[case_name]
        case_rows = measure(case, side_names, quick=quick)
        console.print(_table(case, case_rows))
        rows += case_rows
    if not torch.cuda.is_available():
        console.print("no GPU: these figures mean nothing", style="yellow")
    write_json(json_path, "cudagraphs_speed", rows)
    return rows


def measure(case: Case, sides: Sequence[str], *, quick: bool) -> list[SpeedRow]:
    """Measure sides of one case, by their names, in turn."""
    device = _device()
    size = (16, 2, 2) if quick else (_WIDTH, _HEADS, _LAYERS)
    torch.manual_seed(0)
    model = Transformer(*size, host=case.host).to(device).train(case.train)
    x = torch.randn(_BATCH, 4 if quick else _TOKENS, size[0], device=device)
    torch.compiler.reset()
    chosen = [side for side in _sides(device) if side.name in sides]
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    problems: dict[str, str] = {}
    regions: dict[str, int | None] = {}
    expected = _step(copy.deepcopy(model), x, case)()
    for side in chosen:
        own = copy.deepcopy(model)
        before = _partitions()
        step = _step(side.compile(own), x, case, own)
        try:
            first = step().detach().clone()
            torch.testing.assert_close(first, expected.detach(), rtol=_TOLERANCE, atol=_TOLERANCE)
            for _ in range(2 if quick else _WARM_UP):
                step()
        except Exception as error:
            problems[side.name] = first_line(error)
            continue
        steps[side.name] = step
        regions[side.name] = side.regions(_partitions() - before)
    seconds = _in_turn(steps, rounds=3 if quick else _ROUNDS, device=device)
    floor = _kernel_time(steps["eager"]) if device == "cuda" and "eager" in steps else None
    return [
        _row(case, side.name, seconds, floor, regions.get(side.name), problems.get(side.name, ""))
        for side in chosen
    ]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _partitions() -> int:
    """How many partitions Inductor has made so far in this process."""
    return torch._dynamo.utils.counters["inductor"]["cudagraph_partitions"]  # noqa: SLF001, TID251


def _sides(device: str) -> list[Side]:
    if device == "cpu":
        return [Side("eager", lambda model: model), _partita("partita", recorder="replay")]
    return [
        Side("eager", lambda model: model),
        Side("inductor", torch.compile),
        inductor_graphs("graph_partition", partition=True),
        inductor_graphs("whole graphs", partition=False),
        _partita("partita"),
        _partita("partita + inductor", inner="inductor"),
    ]


def inductor_graphs(name: str, *, partition: bool) -> Side:
    """Inductor with CUDA graphs: of what can be recorded in a graph, or of whole graphs."""
    options: dict[str, Any] = {"triton.cudagraphs": True, "graph_partition": partition}
    return Side(
        name,
        lambda model: torch.compile(model, options=options),
        (lambda partitions: partitions) if partition else (lambda _partitions: None),
    )


def _partita(name: str, **options: Any) -> Side:
    backend = CudaGraphsBackend(**options)
    return Side(
        name,
        lambda model: torch.compile(model, backend=backend),
        lambda _partitions: sum(len(graph.regions) for graph in backend.graphs),
    )


def _step(
    run: Any, x: torch.Tensor, case: Case, parameters: nn.Module | None = None
) -> Callable[[], torch.Tensor]:
    """One step; its result is good until the next one of any side that reuses its memory."""
    optimizer = torch.optim.SGD((parameters or run).parameters(), lr=0.0, foreach=True)

    def forward() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return run(x)

    def train() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result = run(x)
        loss = result.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return train if case.train else forward


def _in_turn(
    steps: dict[str, Callable[[], torch.Tensor]], *, rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each step: between two events on the device, the host's lead included."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(_timed(step, device))
    return seconds


def _timed(step: Callable[[], torch.Tensor], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        step()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()  # nothing is queued: the launches of this step are in the time
    before.record()
    step()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _kernel_time(step: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of all kernels and copies of one step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    # operators have the time of their kernels too: those are counted once
    kernels = (event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA)
    return sum(event.self_device_time_total for event in kernels) / 1e3


def _row(
    case: Case,
    side: str,
    seconds: dict[str, list[float]],
    floor: float | None,
    regions: int | None,
    problem: str,
) -> SpeedRow:
    taken = seconds.get(side)
    if taken is None:
        return SpeedRow(str(case), side, None, None, None, None, floor, regions, problem)
    tenths = statistics.quantiles(taken, n=10)
    return SpeedRow(
        str(case),
        side,
        statistics.median(taken) * 1e3,
        (tenths[0] * 1e3, tenths[-1] * 1e3),
        ratio(seconds["eager"], taken) if "eager" in seconds else None,
        ratio(seconds["inductor"], taken) if "inductor" in seconds else None,
        floor,
        regions,
    )


_COLUMNS = ("side", "ms", "10 % to 90 %", "eager / this", "inductor / this", "regions", "problem")


def _table(case: Case, rows: list[SpeedRow]) -> Table:
    floor = next((row.floor for row in rows if row.floor is not None), None)
    title = f"{case}" + (f"; kernels alone {floor:.3f} ms" if floor is not None else "")
    table = Table(*_COLUMNS, title=title, title_justify="left")
    for row in rows:
        table.add_row(
            row.side,
            "-" if row.milliseconds is None else f"{row.milliseconds:.3f}",
            "-" if row.spread is None else f"{row.spread[0]:.3f} to {row.spread[1]:.3f}",
            str(row.gain or "-"),
            str(row.over_inductor or "-"),
            "-" if row.regions is None else str(row.regions),
            row.problem,
        )
    return table
