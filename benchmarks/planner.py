"""How much faster is a planned pipeline than one cut by the rules of thumb?

Models with uneven ends (embeddings that hold many parameters and take no time, heads that take long, stages
of a U-Net or a Swin whose layers differ) are cut into 2 to 8 stages

    equal layers         as many units in each stage
    equal parameters     the largest stage by parameters as small as can be (DeepSpeed's "parameters")
    equal times          the slowest stage as fast as can be (what torchgpipe's balancing by time does)

and by `partita.planning.search`: for the same schedule (1F1B), and free to choose. Steps are simulated. Then
small models of these kinds are cut in the same ways on two processes, from costs that are measured there, and
their steps are timed in turn.

    python -m benchmarks.planner
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import progress_bar, write_json
from benchmarks.planner_steps import CASES, RULES, MeasuredRow, balanced, measure
from benchmarks.prediction_models import UNEVEN
from partita.planning import (
    Cluster,
    CostModel,
    StageCost,
    Unit,
    get_schedule,
    recomputed_cost,
    search,
    simulate,
)

__all__ = ["MODELS", "Row", "compare", "main"]

FLOPS, BYTES_PER_S = 300e12, 50e9
"""About what an accelerator and its network card reach."""
STAGES = (2, 3, 4, 6, 8)


def block(name: str, tokens: int, width: int, share: float = 1.0, factor: float = 12.0) -> Unit:
    """A layer with ``factor * width ** 2`` parameters, of which each token uses `share`."""
    parameters = int(factor * width**2)
    forward_s = 2 * tokens * parameters * share / FLOPS
    return Unit(
        name,
        forward_s,
        2 * forward_s,
        parameters=parameters,
        parameter_bytes=2 * parameters,
        activation_bytes=34 * tokens * width,
        backward_input_s=1.1 * forward_s,
        backward_weight_s=0.9 * forward_s,
    )


def table(name: str, tokens: int, rows: int, width: int, *, looks_up: bool) -> Unit:
    """An embedding, which only looks up, or a head, which multiplies by all of it."""
    return block(name, tokens, 1, 1e-3 if looks_up else 1.0, factor=rows * width)


def line(units: Sequence[Unit], sizes: Sequence[int]) -> CostModel:
    """The units in a row; a border is as wide as what the unit before it puts out."""
    return CostModel(tuple(units), tuple(sizes[:-1]))


def decoder(vocabulary: int, width: int, layers: int, factor: float) -> CostModel:
    """An embedding, equal layers and a head over the vocabulary."""
    tokens = 2048
    units = [
        table("embedding", tokens, vocabulary, width, looks_up=True),
        *(block(f"layer{index}", tokens, width, factor=factor) for index in range(layers)),
        table("head", tokens, vocabulary, width, looks_up=False),
    ]
    return line(units, [2 * tokens * width] * len(units))


def t5() -> CostModel:
    """An encoder with long inputs, a decoder with short outputs and more parameters a layer."""
    width, source, target = 1024, 1024, 256
    units = [
        table("embedding", source, 32_128, width, looks_up=True),
        *(block(f"encoder{index}", source, width) for index in range(12)),
        *(block(f"decoder{index}", target, width, factor=16.0) for index in range(12)),
        table("head", target, 32_128, width, looks_up=False),
    ]
    return line(units, [2 * source * width] * 13 + [2 * (source + target) * width] * 13)


def u_net() -> CostModel:
    """Down and up again: wide, fast layers with large outputs outside, narrow ones inside, skips across."""
    units, sizes, skips = [], [], 0
    for way, levels in (("down", range(5)), ("up", reversed(range(5)))):
        for level in levels:
            pixels, width = 4 * 256**2 // 4**level, 64 * 2**level
            units += [block(f"{way}{level}.{part}", pixels, width, factor=9.0) for part in range(2)]
            skips += (1 if way == "down" else -1) * 2 * pixels * width
            sizes += [2 * pixels * width, max(skips, 0) + 2 * pixels * width]
    return line(units, sizes)


def swin() -> CostModel:
    """Four stages of 2, 2, 18 and 2 layers: each halves the image and doubles the width."""
    units, sizes = [], []
    for level, layers in enumerate((2, 2, 18, 2)):
        pixels, width = 16 * 56**2 // 4**level, 128 * 2**level
        units += [block(f"stage{level}.{layer}", pixels, width) for layer in range(layers)]
        sizes += [2 * pixels * width] * layers
    return line(units, sizes)


MODELS: dict[str, Callable[[], CostModel]] = {
    "GPT": lambda: decoder(50_257, 1024, 24, 12.0),
    "Llama": lambda: decoder(128_256, 4096, 32, 13.0),
    "T5": t5,
    "U-Net": u_net,
    "Swin": swin,
}


@dataclass(frozen=True)
class Row:
    """Seconds of a simulated step.

    Attributes:
        model: its name.
        stages: how many ranks there are, and stages with the rules of thumb.
        equal_layers_s: with as many units in each stage.
        equal_parameters_s: with parameters balanced.
        equal_times_s: with times balanced.
        planned_s: by `search`, 1F1B with one stage a rank.
        free_s: by `search`, any schedule and placement.
    """

    model: str
    stages: int
    equal_layers_s: float
    equal_parameters_s: float
    equal_times_s: float
    planned_s: float
    free_s: float

    @property
    def best_rule_s(self) -> float:
        """The best of the rules of thumb."""
        return min(self.equal_layers_s, self.equal_parameters_s, self.equal_times_s)


def compare(model: str, stages: int, microbatches: int | None = None) -> Row:
    """One model on so many ranks."""
    costs = MODELS[model]()
    count = 4 * stages if microbatches is None else microbatches
    cluster = Cluster(stages, BYTES_PER_S, 1e-5)
    seconds = [_step_s(costs, balanced(costs, rule, stages), cluster, count) for rule in RULES]
    options = {"microbatches": count}
    planned = search(costs, cluster, schedules=["1F1B"], stages_per_rank=[1], **options)[0]  # type: ignore[arg-type]
    free = search(costs, cluster, **options)[0]  # type: ignore[arg-type]
    return Row(model, stages, seconds[0], seconds[1], seconds[2], planned.makespan_s, free.makespan_s)


def _step_s(costs: CostModel, cuts: Sequence[int], cluster: Cluster, microbatches: int) -> float:
    stages: list[StageCost] = [recomputed_cost(costs, start, end - 1) for start, end in pairwise(cuts)]
    return simulate(get_schedule("1F1B")(len(stages), microbatches), stages, cluster).makespan_s


def main(*, quick: bool = False, json_path: Path | None = None) -> list[Row]:
    """Compare all models, print a table, and write it as JSON on wish."""
    cases = [(model, stages) for model in MODELS for stages in (STAGES[:1] if quick else STAGES)]
    rows = []
    names = [f"{model} on {stages} ranks" for model, stages in cases]
    with progress_bar(Console(stderr=True), "planning", names) as done:
        for model, stages in cases:
            rows.append(compare(model, stages, microbatches=4 if quick else None))
            done()
    print(
        "model   stages  layers  parameters  times   planned 1F1B  planned   (times as long as the best rule)"
    )
    for row in rows:
        parts = (row.equal_layers_s, row.equal_parameters_s, row.equal_times_s, row.planned_s, row.free_s)
        layers, parameters, times, planned, free = (part / row.best_rule_s for part in parts)
        print(
            f"{row.model:8}{row.stages:6}{layers:8.3f}{parameters:12.3f}{times:7.3f}{planned:15.3f}{free:9.3f}"
        )
    _summarise("1F1B", [row.planned_s / row.best_rule_s for row in rows])
    _summarise("free", [row.free_s / row.best_rule_s for row in rows])
    measured = [] if quick else _measured()
    write_json(json_path, "planner", [*rows, *measured])
    return rows


def _summarise(what: str, ratios: Sequence[float]) -> None:
    median, most = statistics.median(ratios), max(ratios)
    print(f"{what}: {median:.3f} of the best rule in the median, {most:.3f} at most")


def _measured() -> list[MeasuredRow]:
    cases = [(model, stages) for stages in CASES for model in UNEVEN]
    rows = []
    with progress_bar(Console(stderr=True), "running", [f"{one} in {count}" for one, count in cases]) as done:
        for model, stages in cases:
            rows.append(measure(model, stages))
            done()
    table = Table("steps on two processes", "stages", *RULES, "planned", "free")
    for row in rows:
        ratios = (*row.rules.values(), row.planned, row.free)
        table.add_row(row.model, str(row.stages), *map(str, ratios))
    Console().print(table)
    _summarise("planned for the same schedule, measured", [row.planned.median for row in rows])
    _summarise("free, measured", [row.free.median for row in rows])
    return rows


if __name__ == "__main__":
    main()
