"""How long F, B, I and W of units take. Each unit runs alone; its backward pass is split as in a stage."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from partita._torch.autograd.engine import run_backward
from partita.pipelining.measuring.meter import Meter
from partita.pipelining.measuring.unit_run import UnitRun
from partita.pipelining.stages.arrivals import Arrivals
from partita.pipelining.stages.split_backward import input_pass

__all__ = ["UnitTimes", "pass_times"]


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of the passes of a unit, each the median of the repeats.

    Attributes:
        spread: the longest less the shortest of the repeats' F and B together, over their median.
    """

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    spread: float


def pass_times(
    units: Sequence[UnitRun], meter: Meter, repeats: int, progress: Callable[[float], None] | None = None
) -> list[UnitTimes]:
    """Measure all units, in turns, so that each repeat finds caches as they are in a whole pass.

    Args:
        repeats: how many count, after one that does not; an exact meter needs one.
        progress: called with the share of the work that is done, from 0.0 to 1.0.
    """
    rounds = 1 if meter.is_exact else 1 + repeats
    rows: list[list[_Row]] = [[] for _ in units]
    try:
        for number in range(rounds):
            for unit, own in zip(units, rows, strict=True):
                unit.prepare_gradients()
                own.append(_row(unit, meter))
            if progress is not None:
                progress((number + 1) / rounds)
    finally:
        for unit in units:
            unit.drop_gradients()
    return [_summary(own if meter.is_exact else own[1:]) for own in rows]


_Row = tuple[float, float, float, float]


def _row(unit: UnitRun, meter: Meter) -> _Row:
    """Seconds of F, B, I and W: one microbatch is sent back whole, another one in two halves."""
    # F and B
    leaves, arguments = unit.leaves()
    outputs, first_forward_s = meter.timed(lambda: unit.call(*arguments))
    roots, seeds = unit.roots(outputs)
    if not roots:
        return first_forward_s, 0.0, 0.0, 0.0
    arrivals = Arrivals(leaves)
    _, backward_s = meter.timed(lambda: run_backward(roots, seeds, accumulate=True))
    arrivals.gradients()
    del outputs, roots, arrivals
    # F, I and W
    leaves, arguments = unit.leaves()
    outputs, second_forward_s = meter.timed(lambda: unit.call(*arguments))
    roots, seeds = unit.roots(outputs)
    half, input_s = meter.timed(lambda: input_pass(roots, seeds, leaves))
    _, weight_s = meter.timed(half.weights.run)
    return (first_forward_s + second_forward_s) / 2, backward_s, input_s if leaves else 0.0, weight_s


def _summary(rows: Sequence[_Row]) -> UnitTimes:
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    whole = [forward_s + backward_s for forward_s, backward_s, _, _ in rows]
    middle = statistics.median(whole)
    spread = (max(whole) - min(whole)) / middle if middle else 0.0
    return UnitTimes(medians[0], medians[1], medians[2], medians[3], spread)
