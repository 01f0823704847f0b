"""The weights of the microbatches' losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partita.errors import MicrobatchError
from partita.runtime import MicrobatchPlan
from partita.runtime.sample_lists import check_lists

__all__ = ["LossWeights", "check_targets", "checked_weights", "step_weights"]

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class LossWeights:
    """Weights for ``step(loss_weights=…)``: each microbatch's loss, and so its gradient, is multiplied by its
    own.

    Attributes:
        values: one for each microbatch, in order; finite, not negative.
        total: what they must sum to (relative tolerance 1e-6); None for any sum.

    Raises:
        MicrobatchError: a value that can't be a weight, or another sum.

    >>> LossWeights((0.5, 0.25, 0.25)).total
    1.0
    """

    values: tuple[float, ...]
    total: float | None = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(float(value) for value in self.values))
        for number, value in enumerate(self.values):
            if not math.isfinite(value) or value < 0:
                raise MicrobatchError(
                    f"loss_weights has {value} for microbatch {number}: give finite numbers of at least 0"
                )
        actual = math.fsum(self.values)
        if self.total is not None and not math.isclose(actual, self.total, rel_tol=_TOLERANCE):
            raise MicrobatchError(
                f"loss_weights sum to {actual:g}, not to {self.total:g}: use "
                "LossWeights.proportional(counts) for a mean over the whole batch, or say "
                "LossWeights(values, total=None) where another sum is meant"
            )

    @classmethod
    def proportional(cls, counts: Sequence[float]) -> LossWeights:
        """The weights of means over different numbers of elements: then the pipeline's gradient is that of
        the mean over all of them.

        Args:
            counts: how many elements (tokens that are not padding) each microbatch's mean goes over.

        >>> LossWeights.proportional([3, 1]).values
        (0.75, 0.25)
        """
        total = math.fsum(counts)
        if not total > 0:
            raise MicrobatchError(
                f"the counts {list(counts)} sum to {total:g}: a mean needs at least one element; leave a "
                "batch out that is all padding"
            )
        return cls(tuple(float(count) / total for count in counts))


def checked_weights(loss_weights: LossWeights | Sequence[float], microbatches: int) -> tuple[float, ...]:
    """One weight for each microbatch; a plain sequence must sum to 1.

    Raises:
        MicrobatchError: another number of weights, or weights that `LossWeights` refuses.
    """
    weights = loss_weights if isinstance(loss_weights, LossWeights) else LossWeights(tuple(loss_weights))
    if len(weights.values) != microbatches:
        raise MicrobatchError(
            f"loss_weights has {len(weights.values)} values for {microbatches} microbatches: give one for "
            "each"
        )
    return weights.values


def check_targets(rows: Sequence[int], samples: Sequence[int], target: Any = None) -> None:
    """Check that each microbatch's target belongs to its samples: as many rows, or the same multiple of them
    in all microbatches. A loss may broadcast another number without a word.

    Args:
        rows: of each microbatch's target; empty where nothing was cut.
        samples: of each microbatch; empty, or 0, where they are not known.
        target: the whole batch's: no list that may have an entry for each sample.

    Raises:
        MicrobatchError: names both.

    >>> check_targets([6, 4], [3, 2])  # two rows for each sample
    """
    total, batch = sum(rows), sum(samples)
    if not rows or not samples or not all(samples):
        return
    if len(samples) > 1:
        check_lists(target, "target", batch, specified=False)
    if any(row * batch != size * total for row, size in zip(rows, samples, strict=True)):
        raise MicrobatchError(
            f"the target has {total} rows, which make microbatches of {tuple(rows)}, but the batch makes "
            f"microbatches of {tuple(samples)} samples: give a target with a row for each sample, along its "
            "first dimension, or cut both by yourself: arg_mbs=[...], target_mbs=[...]"
        )


def step_weights(
    loss_weights: LossWeights | Sequence[float] | None, samples: Sequence[int], count: int, *, scaled: bool
) -> tuple[float, ...]:
    """The weight of each microbatch's loss in a step.

    Args:
        loss_weights: the user's own; None: they follow from the other arguments.
        samples: how many each microbatch has, with 0 for an unknown number; empty: all count the same.
        count: how many microbatches there are.
        scaled: whether the losses are means over the samples of a microbatch, so that each counts for its
            share of the batch; else they are summed.

    Raises:
        MicrobatchError: weights that `LossWeights` refuses, or a microbatch of unknown size.

    >>> step_weights(None, (3, 1), 2, scaled=True)
    (0.75, 0.25)
    """
    if loss_weights is not None:
        return checked_weights(loss_weights, count)
    if not scaled:
        return (1.0,) * count
    if 0 in samples:
        raise MicrobatchError(
            f"microbatch {list(samples).index(0)} has tensors that differ in their first dimension, so its "
            "share of the batch is not known: give loss_weights to step(), or make the schedule with "
            "scale_grads=False"
        )
    return MicrobatchPlan(tuple(samples)).weights if samples else (1.0 / count,) * count
