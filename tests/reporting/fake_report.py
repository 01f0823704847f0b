"""A made-up run that looks like a real one: 3 stages, 8 microbatches of 1F1B, 60 steps. Always the same.

``python tests/reporting/fake_report.py report.html`` writes its report, to look at while the page is changed;
``... buckets.html buckets`` that of a data parallel backward pass.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.reporting import (
    BackwardPass,
    LossPoint,
    ReducedBucket,
    RunReport,
    StageRow,
    Timeline,
    TimelineSpan,
    key_figures,
    render_html,
)

__all__ = ["fake_backward", "fake_losses", "fake_report", "fake_timeline", "one_f_one_b"]

_MEBI = 2**20


def one_f_one_b(stages: int, microbatches: int) -> list[list[tuple[str, int]]]:
    """For each stage its ("F" or "B", microbatch) in the order of 1F1B."""
    order = []
    for stage in range(stages):
        warm = min(stages - stage, microbatches)
        actions = [("F", index) for index in range(warm)]
        for index in range(microbatches):
            actions.append(("B", index))
            if warm + index < microbatches:
                actions.append(("F", warm + index))
        order.append(actions)
    return order


def fake_timeline(
    title: str = "Simulated",
    *,
    costs: Sequence[tuple[float, float]] = ((0.0081, 0.0166), (0.0088, 0.0181), (0.0094, 0.0172)),
    microbatches: int = 8,
    noise: float = 0.0,
    send_s: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """1F1B with the given (forward, backward) seconds a stage, one stage a rank; a send takes `send_s`."""
    dice = random.Random(seed)
    order = one_f_one_b(len(costs), microbatches)
    arrived: dict[tuple[str, int, int], float] = {}
    spans: list[TimelineSpan] = []
    clock = [0.0] * len(costs)
    turn = [0] * len(costs)
    while any(turn[stage] < len(order[stage]) for stage in range(len(costs))):
        for stage, (forward, backward) in enumerate(costs):
            while turn[stage] < len(order[stage]):
                kind, index = order[stage][turn[stage]]
                first = stage == 0 if kind == "F" else stage == len(costs) - 1
                if not first and (kind, stage, index) not in arrived:
                    break
                start = max(clock[stage], arrived.get((kind, stage, index), 0.0))
                cost = (forward if kind == "F" else backward) * (1 + noise * dice.uniform(-0.6, 1.4))
                end = start + cost
                spans.append(TimelineSpan(stage, f"{stage}{kind}{index}", kind, stage, index, start, end))
                towards = stage + (1 if kind == "F" else -1)
                if 0 <= towards < len(costs):
                    arrived[kind, towards, index] = end + send_s
                    if send_s:
                        label = f"{stage}SEND_{kind}{index}"
                        spans.append(TimelineSpan(stage, label, "comm", stage, index, end, end + send_s))
                clock[stage] = end
                turn[stage] += 1
    return Timeline.from_spans(title, spans)


def fake_losses(
    steps: int = 60, *, first: float = 5.5, last: float = 2.4, seed: int = 0
) -> tuple[LossPoint, ...]:
    """A curve that falls from `first` to about `last`, the same on both sides."""
    dice = random.Random(seed)
    points = []
    for step in range(steps):
        falling = last + (first - last) * math.exp(-4.0 * step / max(1, steps - 1))
        loss = falling + (dice.gauss(0, 0.035) if step else 0.0)
        points.append(LossPoint(step, loss, loss))
    return tuple(points)


def fake_report() -> RunReport:
    """The whole report."""
    measured = fake_timeline("Measured", noise=0.08, send_s=0.0011, seed=3)
    simulated = fake_timeline("Simulated", send_s=0.0008)
    losses = fake_losses()
    return RunReport(
        title="Decoder-only transformer in 3 stages",
        subtitle="10.2 M parameters, 1F1B, 8 microbatches of 4 sequences, 60 steps on two CPU cores",
        stages=(
            StageRow(
                0, 0, ("embed", "positions", "layers.0-3"), 3_240_448, 3_240_448 * 4, 0.0081, 0.0166, _MEBI
            ),
            StageRow(1, 1, ("layers.4-8",), 3_943_680, 3_943_680 * 4, 0.0088, 0.0181, _MEBI),
            StageRow(2, 2, ("layers.9-11", "norm", "head"), 3_024_128, 3_024_128 * 4, 0.0094, 0.0172, 0),
        ),
        losses=losses,
        measured=measured,
        simulated=simulated,
        figures=key_figures(
            parameter_difference=0.0,
            bitwise_equal=True,
            pipelined_samples_s=138.4,
            reference_samples_s=102.9,
            measured=measured,
            simulated=simulated,
        ),
        environment={
            "partita": "0.1.0",
            "torch": "2.13.0 (CPU)",
            "python": "3.11.2",
            "backend": "gloo, loopback",
            "processor": "2 cores, x86-64",
            "seed": "0",
            "schedule": "1F1B",
            "dtype": "float32",
        },
        validation=tuple(
            LossPoint(point.step, point.pipelined + 0.12, point.reference + 0.12) for point in losses[19::20]
        ),
    )


def fake_backward(buckets: int = 5, *, pass_s: float = 0.06, link_s: float = 0.016) -> BackwardPass:
    """Buckets that get ready one after another, and go over one link that is slower than that."""
    free_s, made = 0.0, []
    for number in range(buckets):
        ready_s = pass_s * (number + 1) / buckets
        start_s = max(free_s, ready_s)
        free_s = start_s + link_s
        known_s = max(pass_s, free_s)
        names = tuple(f"layers.{4 * (buckets - number) - n // 2}.{'wb'[n % 2]}" for n in range(8))
        before_s = max(pass_s, made[-1].finished_s if made else 0.0)
        made.append(
            ReducedBucket(
                number, names, 25 * _MEBI, "float32", ready_s, ready_s + 0.0004, known_s, known_s - before_s
            )
        )
    return BackwardPass(0, 2, pass_s, tuple(made))


if __name__ == "__main__":
    report = fake_report()
    if sys.argv[2:] == ["buckets"]:
        report = replace(report, stages=(), losses=(), validation=(), backward=fake_backward())
        report = replace(report, measured=Timeline("", (), 0.0, 0.0), simulated=Timeline("", (), 0.0, 0.0))
    Path(sys.argv[1]).write_text(render_html(report), encoding="utf-8")
