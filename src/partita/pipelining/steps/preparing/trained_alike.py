"""Whether optimizers train the weights of all ranks alike: after each step of the schedule, and with learning
rates that rise and fall together.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from partita.pipelining.stages.optimizer_steps import before_optimizers_step, steps_any_of
from partita.pipelining.stages.stage import Stage

__all__ = ["TrainedAlike"]

_HABIT = 2
"""So many times in a row both ranks have done the same: then it is no plan that one of them does not."""

_CLOSE = 1e-6
"""How far two rates may be from each other."""


@dataclass(frozen=True, slots=True)
class _Training:
    """What one rank tells another before a step.

    Attributes:
        steps: after how many training steps an optimizer has stepped its weights; -1 where none is trained.
        rate: the learning rate over that of the first step; NaN where nobody knows, and where groups of
            parameters, or optimizers, have schedules of their own.
    """

    steps: int = 0
    rate: float = math.nan

    def numbers(self) -> tuple[int, int]:
        return self.steps, struct.unpack("<q", struct.pack("<d", self.rate))[0]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> _Training:
        return cls(numbers[0], struct.unpack("<d", struct.pack("<q", numbers[1]))[0])

    def has_rate_of(self, other: _Training) -> bool:
        return math.isclose(self.rate, other.rate, rel_tol=_CLOSE)


class TrainedAlike:
    """Watches the optimizers of this rank, and compares what they do with other ranks. A rank that leaves its
    optimizer out where its own loss is not finite falls a step behind the others; one whose scheduler looks
    at a loss that it alone has goes on with another learning rate.

    Args:
        stages: of this rank.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = list(stages)
        self._steps = 0
        self._is_stepped = False
        self._first_rates: WeakKeyDictionary[Optimizer, list[float]] = WeakKeyDictionary()
        self._changes: list[float] = []
        self._before: dict[int, tuple[int, int]] = {}
        self._stepped_alike: dict[int, int] = {}
        self._rates_alike: dict[int, int] = {}
        before_optimizers_step(self, TrainedAlike._before_step)

    def numbers(self) -> tuple[int, int]:
        """What the other ranks are told; asked for at the beginning of each training step."""
        if not any(weight.requires_grad for stage in self._stages for weight in stage.module.parameters()):
            return _Training(-1).numbers()
        self._steps += self._is_stepped
        self._is_stepped = False
        changes = self._changes
        is_one = all(math.isclose(change, changes[0], rel_tol=_CLOSE) for change in changes)
        return _Training(self._steps, changes[0] if changes and is_one else math.nan).numbers()

    def compare(self, rank: int, peer: int, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Compare the numbers of ``rank``, which is this one, with those of another.

        Warns:
            UserWarning: one of the two was stepped since the last comparison, or its learning rate has
                changed, and the other's not, which has not been so before.
        """
        ours, others = _Training.of_numbers(mine), _Training.of_numbers(theirs)
        if -1 in (ours.steps, others.steps):
            return
        before = self._before.get(peer, (0, 0))
        self._before[peer] = ours.steps, others.steps
        stepped, other = ours.steps > before[0], others.steps > before[1]
        both = stepped and other and not math.isnan(ours.rate + others.rate)
        text = ""
        if _is_new(self._stepped_alike, peer, alike=stepped == other, counts=stepped):
            text = _left_out(rank, peer) if other else _left_out(peer, rank)
        elif both and _is_new(self._rates_alike, peer, alike=ours.has_rate_of(others), counts=True):
            text = (
                f"the learning rate of rank {rank} is {ours.rate:.3g} of what it was at first, and that of "
                f"rank {peer} {others.rate:.3g}, where they had been alike: step the schedulers of all "
                "ranks, and give one that looks at a loss (ReduceLROnPlateau) the same number everywhere: "
                "broadcast the mean of the last stage's losses"
            )
        if text:
            warnings.warn(text, UserWarning, stacklevel=6)

    def _before_step(self, optimizer: Optimizer) -> None:
        if optimizer not in self._first_rates and not steps_any_of(optimizer, self._stages):
            return
        if not self._is_stepped:
            self._is_stepped, self._changes = True, []
        rates = [_rate(group.get("lr")) for group in optimizer.param_groups]
        if any(rate > 0 for rate in rates):
            self._first_rates.setdefault(optimizer, rates)
        pairs = zip(rates, self._first_rates.get(optimizer, ()), strict=False)  # without groups added since
        self._changes += [rate / first for rate, first in pairs if first > 0]


def _rate(rate: object) -> float:
    """The learning rate as a number; NaN where that would wait for a device, and where there is none."""
    if isinstance(rate, Tensor) and rate.device.type == "cpu":
        return rate.item()
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def _left_out(rank: int, other: int) -> str:
    return (
        f"an optimizer has stepped the weights of rank {other} since the last step, and none those of rank "
        f"{rank}, for the first time: the model's stages are of different steps now. Where a step is left "
        "out (a loss or a gradient that is not finite), decide so on all ranks alike: "
        "partita.pipelining.GradScaler does, and clip_grad_norm_ returns the same norm everywhere"
    )


def _is_new(alike_so_far: dict[int, int], peer: int, *, alike: bool, counts: bool) -> bool:
    """Note whether two ranks did the same; return whether they did not, for the first time."""
    if alike:
        alike_so_far[peer] = alike_so_far.get(peer, 0) + counts
        return False
    return alike_so_far.pop(peer, 0) >= _HABIT
