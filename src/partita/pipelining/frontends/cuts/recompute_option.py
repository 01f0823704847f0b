"""What `pipeline` is told to recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partita.errors import ArgumentError
from partita.planning import Plan

__all__ = ["Recompute", "RecomputeOption", "recompute_option"]

Recompute = bool | Sequence[int | str]
"""True: every stage as a whole; or stages by their index and submodules by their names."""


@dataclass(frozen=True)
class RecomputeOption:
    """What is recomputed in the backward pass.

    Attributes:
        every: every stage as a whole.
        stages: these stages as a whole.
        modules: patterns of the names of submodules, each call of which is recomputed by itself.
        units: regions of units of the plan, (first, last), each recomputed by itself.
    """

    every: bool = False
    stages: tuple[int, ...] = ()
    modules: tuple[str, ...] = ()
    units: tuple[tuple[int, int], ...] = ()

    def whole_stages(self, count: int) -> frozenset[int]:
        """The stages that are recomputed as a whole, of so many.

        Raises:
            ArgumentError: there is no such stage.
        """
        for stage in self.stages:
            if not 0 <= stage < count:
                raise ArgumentError(
                    f"recompute names stage {stage}, and the model is cut into {count}: give numbers from 0 "
                    f"to {count - 1}"
                )
        return frozenset(range(count) if self.every else self.stages)


def recompute_option(recompute: Recompute | None, plan: Plan | None) -> RecomputeOption:
    """Read the argument; where it is not given, what the plan says.

    Raises:
        ArgumentError: neither a bool nor a list of stages and names.
    """
    if recompute is None:
        return RecomputeOption() if plan is None else _of_plan(plan)
    if isinstance(recompute, bool):
        return RecomputeOption(every=recompute)
    items = [recompute] if isinstance(recompute, str) else list(recompute)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise ArgumentError(
                f"recompute has {item!r}: give True, or a list of stages by index and of submodules by name"
            )
    return RecomputeOption(
        stages=tuple(item for item in items if isinstance(item, int)),
        modules=tuple(item for item in items if isinstance(item, str)),
    )


def _of_plan(plan: Plan) -> RecomputeOption:
    whole = tuple(
        stage.index for stage in plan.stages if stage.recompute == ((stage.first_unit, stage.last_unit),)
    )
    units = tuple(region for stage in plan.stages if stage.index not in whole for region in stage.recompute)
    return RecomputeOption(stages=whole, units=units)
