"""How long F, B, I and W of units take. Each unit runs alone; its backward pass is split as in a stage."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from partita._torch.autograd.engine import run_backward
from partita._torch.tensors.versions import times_written
from partita.pipelining.measuring.meter import Meter
from partita.pipelining.measuring.unit_run import UnitRun
from partita.pipelining.stages.backward.arrivals import Arrivals
from partita.pipelining.stages.backward.split_backward import input_pass
from partita.runtime.freed_memory import freed_memory_kept

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
    with nullcontext() if meter.is_exact else freed_memory_kept():  # as in a step
        return _pass_times(units, meter, repeats, progress)


def _pass_times(
    units: Sequence[UnitRun], meter: Meter, repeats: int, progress: Callable[[float], None] | None
) -> list[UnitTimes]:
    rounds = 1 if meter.is_exact else 1 + repeats
    rows: list[list[_Row]] = [[] for _ in units]
    waiting: list[_Flight | None] = [None] * len(units)
    alone = [_writes_to_saved(unit) for unit in units]
    try:
        for number in range(rounds):
            for position, unit in enumerate(units):
                unit.prepare_gradients()
                if alone[position]:
                    row = _row_of_one(unit, meter)
                else:
                    row, waiting[position] = _row(unit, meter, waiting[position])
                rows[position].append(row)
            if progress is not None:
                progress((number + 1) / rounds)
    finally:
        waiting.clear()
        for unit in units:
            unit.drop_gradients()
    return [_summary(own if meter.is_exact else own[1:]) for own in rows]


_Row = tuple[float, float, float, float]


@dataclass(slots=True)
class _Flight:
    """A microbatch between its forward and its backward pass."""

    leaves: list[Tensor]
    roots: list[Tensor]
    seeds: list[Tensor]
    forward_s: float

    @classmethod
    def begun(cls, unit: UnitRun, meter: Meter) -> _Flight:
        leaves, arguments = unit.leaves()
        outputs, forward_s = meter.timed(lambda: unit.call(*arguments))
        return cls(leaves, *unit.roots(outputs), forward_s)

    def clear(self) -> None:
        """Drop its memory, whoever still refers to it."""
        self.leaves, self.roots, self.seeds = [], [], []


def _writes_to_saved(unit: UnitRun) -> bool:
    """Whether a forward pass writes to what the one before has saved for its backward pass, such as a buffer
    that counts. A stage keeps such buffers for each microbatch; a unit sends one back before the next, and so
    does one that takes gradients by ``torch.func``, within which nothing tells what is saved.
    """
    saved: list[tuple[Tensor, int]] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append((tensor, times_written(tensor)))
        return tensor

    try:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            unit.call(*unit.leaves()[1])
    except RuntimeError:  # torch.func.grad and its like refuse to run; an error of the unit's own comes again
        unit.call(*unit.leaves()[1])
        return True
    unit.call(*unit.leaves()[1])
    return any(times_written(tensor) != version for tensor, version in saved)


def _row_of_one(unit: UnitRun, meter: Meter) -> _Row:
    """Seconds of F, B, I and W, one microbatch at a time."""
    first = _Flight.begun(unit, meter)
    if not first.roots:
        return first.forward_s, 0.0, 0.0, 0.0
    backward_s = _backward_s(first, meter)
    second = _Flight.begun(unit, meter)
    input_s, weight_s = _halves_s(second, meter)
    return (first.forward_s + second.forward_s) / 2, backward_s, input_s, weight_s


def _backward_s(flight: _Flight, meter: Meter) -> float:
    arrivals = Arrivals(flight.leaves)
    _, backward_s = meter.timed(lambda: run_backward(flight.roots, flight.seeds, accumulate=True))
    arrivals.gradients()
    flight.clear()
    return backward_s


def _halves_s(flight: _Flight, meter: Meter) -> tuple[float, float]:
    half, input_s = meter.timed(lambda: input_pass(flight.roots, flight.seeds, flight.leaves))
    _, weight_s = meter.timed(half.weights.run)
    return input_s if flight.leaves else 0.0, weight_s


def _row(unit: UnitRun, meter: Meter, waiting: _Flight | None) -> tuple[_Row, _Flight | None]:
    """Seconds of F, B, I and W, and a microbatch that has yet to go back.

    One microbatch is sent back whole, another one in two halves. Where there is memory on the host, a third
    one waits, as others do in a step: if all memory were free in between, it would go back to the system, and
    each pass would have to ask for it again.

    Args:
        waiting: the microbatch that waits, from the call before.
    """
    second = _Flight.begun(unit, meter)
    forwards_s = [second.forward_s]
    if not second.roots:
        return (second.forward_s, 0.0, 0.0, 0.0), None
    if waiting is None:
        waiting, second = second, _Flight.begun(unit, meter)
        forwards_s.append(second.forward_s)
    backward_s = _backward_s(waiting, meter)
    third = None
    if meter.keeps_waiting:
        third = _Flight.begun(unit, meter)
        forwards_s.append(third.forward_s)
    input_s, weight_s = _halves_s(second, meter)
    return (sum(forwards_s) / len(forwards_s), backward_s, input_s, weight_s), third


def _summary(rows: Sequence[_Row]) -> UnitTimes:
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    whole = [forward_s + backward_s for forward_s, backward_s, _, _ in rows]
    middle = statistics.median(whole)
    spread = (max(whole) - min(whole)) / middle if middle else 0.0
    return UnitTimes(medians[0], medians[1], medians[2], medians[3], spread)
