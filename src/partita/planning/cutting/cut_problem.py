"""A model's units as the numbers that cuts are chosen by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from partita.planning.costs.cost_model import CostModel
from partita.planning.cutting._cuts import CutProblem
from partita.planning.hardware.cluster import Cluster

__all__ = ["PER_SECOND", "make_cut_problem"]

PER_SECOND = 10**15
"""Times are compared in whole femtoseconds, so that what is equal on paper is equal here."""
_NO_FRACTION = 1e200
"""A float as large as this is a whole number, and times a quadrillion it might be none."""


def make_cut_problem(
    costs: CostModel,
    cluster: Cluster | None,
    in_flight: Sequence[int],
    parameter_copies: float,
    *,
    hides_transfers: bool,
    trains: bool = True,
) -> CutProblem:
    """The problem of cutting a model into as many stages as `in_flight` has numbers, without a limit.

    Args:
        costs: the units.
        cluster: the links; without it, messages take no time.
        in_flight: for each stage, the most microbatches that it keeps.
        parameter_copies: as in `plan_stages`.
        hides_transfers: as `ScheduleKind` has it.
        trains: likewise.
    """
    link = Cluster(1) if cluster is None else cluster
    units = costs.units
    computes = (_whole(unit.forward_s) + (_whole(unit.backward_s) if trains else 0) for unit in units)
    leave = [_whole(link.transfer_s(size)) for size in costs.crossing_bytes]
    enter = [_whole(link.transfer_s(size)) if trains else 0 for size in costs.gradient_bytes]
    return CutProblem(
        compute=_sums(computes),
        leave=(0, *leave, 0),
        enter=(0, *enter, 0),
        hidden=hides_transfers,
        crossing=(0, *costs.crossing_bytes, 0),
        places=(0, *(border + 1 for border in costs.allowed_borders), len(units)),
        static=_sums(round(parameter_copies * unit.parameter_bytes) for unit in units),
        activations=_sums(unit.activation_bytes for unit in units),
        in_flight=tuple(in_flight),
        memory=None,
        entering=() if costs.entry_bytes is None else (0, *costs.entry_bytes, 0),
        leaving=() if costs.exit_bytes is None else (0, *costs.exit_bytes, 0),
        tied=costs.tied,
        tied_copies=parameter_copies,
    )


def _whole(seconds: float) -> int:
    return round(seconds * PER_SECOND) if seconds < _NO_FRACTION else int(seconds) * PER_SECOND


def _sums(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))
