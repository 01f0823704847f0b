"""What a stage costs where some of its units are computed again in the backward pass.

(T. Chen et al., "Training deep nets with sublinear memory cost", 2016.)

A region is a run of neighbouring units of a stage of which only what enters is kept. A region that is the
whole stage is computed again as a whole at the start of B or I, and what W needs of it stays until W. A
region that is a part of a stage is computed again by itself, the last one first, and its gradients are then
all computed, those of its weights too, before the next one is::

    units          u0 u1 u2 u3          regions ((1, 2),)
    F keeps        u0, what enters u1, u3
    I              u3 backward, u1 and u2 forward, both backward with their weights, u0 backward
    W              the weights of u0 and u3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from partita.errors import PlanError
from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.spanning import NOTHING_SHARED, Messages, SharedOnRank
from partita.planning.costs.stage_cost import StageCost
from partita.planning.costs.tied_gradients import tied_gradients
from partita.planning.costs.units import Unit
from partita.planning.costs.workspaces import half_workspaces, workspaces

__all__ = ["Regions", "recompute_options", "recomputed_cost"]

Regions = tuple[tuple[int, int], ...]
"""(first unit, last unit) of each region, in order and apart."""

_PARTS = (2, 4, 8)
"""Into so many parts a stage is divided for a choice among them."""


def recomputed_cost(
    costs: CostModel,
    first_unit: int,
    last_unit: int,
    regions: Sequence[tuple[int, int]] = (),
    parameter_copies: float = 1.0,
    *,
    shared: SharedOnRank = NOTHING_SHARED,
    whole: StageCost | None = None,
) -> StageCost:
    """The cost of the stage of the units from `first_unit` to `last_unit`, of which `regions` are recomputed.

    Args:
        costs: the units of the model.
        first_unit: index of the stage's first unit.
        last_unit: index of its last one.
        regions: (first, last) of each region, in order and apart; none: nothing is computed again.
        parameter_copies: as in `plan_stages`, for `StageCost.static_bytes`.
        shared: what it and other stages of its rank hand over, from `shared_on_rank`.
        whole: what this gives for the same stage without regions, where that is there already and nothing
            that enters is shared.

    Raises:
        PlanError: units that do not exist, or regions that overlap or are not in the stage.

    >>> units = tuple(Unit(name, 1.0, 2.0, activation_bytes=10) for name in "abcd")
    >>> cost = recomputed_cost(CostModel(units, (3, 3, 3)), 1, 3, [(1, 3)])
    >>> cost.activation_bytes, cost.recompute_s, cost.recompute_bytes
    (3, 3.0, 30)
    """
    if not 0 <= first_unit <= last_unit < len(costs.units):
        raise PlanError(
            f"units {first_unit} to {last_unit} are no stage: give two of 0 to {len(costs.units) - 1}"
        )
    free = first_unit
    for first, last in regions:
        if not free <= first <= last <= last_unit:
            raise PlanError(
                f"region ({first}, {last}) is not in units {free} to {last_unit}: give regions within the "
                "stage, in order and apart"
            )
        free = last + 1
    messages = costs.messages(first_unit, last_unit, shared)
    once = whole
    if once is None:
        once = _cost_once(costs, first_unit, last_unit, parameter_copies, messages, shared)
    if tuple(regions) == ((first_unit, last_unit),):
        return _whole(costs, first_unit, last_unit, once)
    if regions:
        return _parts(costs, first_unit, last_unit, tuple(regions), once)
    handed = shared.entering_bytes if costs.entry_bytes is not None else 0
    if not handed:
        return once
    # An earlier stage of the rank has put that out, or been sent it, and keeps it as long.
    # It lets go of that in its I; what W of this one needs is here until then.
    return replace(
        once,
        activation_bytes=max(once.activation_bytes - handed, 0),
        weight_activation_bytes=once.weight_bytes,
    )


def _cost_once(
    costs: CostModel,
    first: int,
    last: int,
    parameter_copies: float,
    messages: Messages,
    shared: SharedOnRank,
) -> StageCost:
    units = costs.units[first : last + 1]
    split = costs.split_backward_s(first, last)
    forward_workspace, backward_workspace = workspaces(costs, first, last)
    halves = half_workspaces(costs, first, last)
    # Shares in gradients of tied parameters are computed in I; the gradient that is sent is there until W.
    tied, late = tied_gradients(costs, first, last), costs.only_in_w(first, last)
    left, early_s = costs.left_bytes(first, last) + tied.owned, 0.0
    by_units = costs.left_by_units(first, last)
    for number, part in tied.early.items():
        unit = costs.units[number]
        left -= int(part * by_units[number - first])
        early_s += part * _weight_s(unit, number in late)
    return StageCost(
        forward_s=sum(unit.forward_s for unit in units),
        backward_s=sum(unit.backward_s for unit in units),
        backward_input_s=None if split is None else split[0] + early_s,
        backward_weight_s=None if split is None else max(split[1] - early_s, 0.0),
        send_bytes=costs.sent_bytes(first, last),
        send_grad_bytes=costs.sent_gradient_bytes(first, last),
        activation_bytes=costs.kept_bytes(first, last),
        weight_activation_bytes=max(left, 0),
        forward_workspace_bytes=forward_workspace,
        backward_workspace_bytes=backward_workspace,
        input_workspace_bytes=None if halves is None else halves[0],
        weight_workspace_bytes=None if halves is None else halves[1],
        arriving_bytes=messages.entering,
        arriving_gradient_bytes=messages.received_back + tied.received,
        returned_gradient_bytes=messages.sent_back + tied.sent - shared.sent_tied_bytes,
        handed_gradients=shared.handed_gradients if costs.entry_bytes is not None else (),
        sent_values=shared.sent_values if costs.entry_bytes is not None else None,
        static_bytes=round(parameter_copies * costs.parameter_bytes(first, last)),
    )


def _passing(units: Sequence[Unit]) -> int:
    """What a forward pass that keeps nothing needs while it runs."""
    return max(unit.activation_bytes + unit.forward_workspace_bytes for unit in units)


def _whole(costs: CostModel, first: int, last: int, once: StageCost) -> StageCost:
    entering = costs.entering_bytes(first, last)
    entry = costs.entry_bytes[first - 1] if costs.entry_bytes is not None and first else 0
    return replace(
        once,
        activation_bytes=entering,
        recompute_s=once.forward_s,
        recompute_bytes=max(once.activation_bytes - entry, 0),
        forward_workspace_bytes=_passing(costs.units[first : last + 1]),
    )


def _parts(costs: CostModel, first_unit: int, last_unit: int, regions: Regions, once: StageCost) -> StageCost:
    inside = [costs.units[first : last + 1] for first, last in regions]
    units = [unit for region in inside for unit in region]
    late = costs.only_in_w(first_unit, last_unit)
    is_late = [unit in late for first, last in regions for unit in range(first, last + 1)]
    # The stage's own input is kept whole where its first region starts there, in place of a part of it.
    entry = 0
    if regions[0][0] == first_unit and first_unit and costs.entry_bytes is not None:
        entry = costs.entry_bytes[first_unit - 1]
    kept = once.activation_bytes - entry - sum(unit.activation_bytes for unit in units)
    kept += sum(costs.entering_bytes(*region) for region in regions)
    # The weights of the regions are done in I.
    input_s = once.backward_s / 2 if once.backward_input_s is None else once.backward_input_s
    weight_s = once.backward_s / 2 if once.backward_weight_s is None else once.backward_weight_s
    early_s = min(sum(map(_weight_s, units, is_late)), weight_s)
    by_units = costs.left_by_units(first_unit, last_unit)
    left = once.weight_bytes - entry
    left -= sum(sum(by_units[first - first_unit : last - first_unit + 1]) for first, last in regions)
    regions_backward = max(unit.backward_workspace_bytes for unit in units)
    starts = (region[0] for region in inside)
    regions_backward = max(
        regions_backward, *(unit.backward_workspace_bytes + unit.copied_gradient_bytes for unit in starts)
    )
    inputs = once.input_workspace_bytes
    return replace(
        once,
        backward_input_s=input_s + early_s,
        backward_weight_s=max(weight_s - early_s, 0.0),
        activation_bytes=max(kept, 0),
        weight_activation_bytes=max(left, 0),
        recompute_s=sum(unit.forward_s for unit in units),
        recompute_bytes=max(sum(unit.activation_bytes for unit in region) for region in inside),
        forward_workspace_bytes=max(once.forward_workspace_bytes, _passing(units)),
        backward_workspace_bytes=max(once.backward_workspace_bytes, regions_backward),
        input_workspace_bytes=None if inputs is None else max(inputs, regions_backward),
    )


def _weight_s(unit: Unit, only_in_w: bool) -> float:
    if only_in_w:
        return unit.backward_s
    return unit.backward_s / 2 if unit.backward_weight_s is None else unit.backward_weight_s


def recompute_options(costs: CostModel, first_unit: int, last_unit: int) -> Iterator[Regions]:
    """Regions worth a try for a stage, from none to all of it.

    The stage is divided at the borders with the fewest bytes across into a few parts of about equal time, of
    which the first, the first two and so on up to all are recomputed; then the whole stage as one region.
    """
    yield ()
    offered: set[Regions] = {()}
    for parts in _PARTS:
        pieces = _divided(costs, first_unit, last_unit, parts)
        if len(pieces) > 1:
            # What frees most bytes for its time goes first.
            order = sorted(range(len(pieces)), key=lambda piece: -_saved_per_second(costs, pieces[piece]))
            for count in range(1, len(pieces) + 1):
                regions = tuple(sorted(pieces[piece] for piece in order[:count]))
                if regions not in offered:
                    offered.add(regions)
                    yield regions
    if ((first_unit, last_unit),) not in offered:
        yield ((first_unit, last_unit),)


def _saved_per_second(costs: CostModel, region: tuple[int, int]) -> float:
    units = costs.units[region[0] : region[1] + 1]
    saved = sum(unit.activation_bytes for unit in units) - costs.entering_bytes(*region)
    return saved / max(sum(unit.forward_s for unit in units), 1e-12)


def _divided(costs: CostModel, first: int, last: int, parts: int) -> Regions:
    """The stage in up to `parts` runs of about equal forward time, divided where few bytes cross."""
    share = sum(unit.forward_s for unit in costs.units[first : last + 1]) / parts
    borders: list[int] = []
    passed_s = 0.0
    window: list[tuple[int, float, int]] = []
    for unit in range(first, last):
        passed_s += costs.units[unit].forward_s
        place = len(borders) + 1
        if (costs.borders is None or unit in costs.borders) and abs(passed_s - place * share) <= share / 2:
            window.append((costs.crossing_bytes[unit], abs(passed_s - place * share), unit))
        if passed_s > (place + 0.5) * share and window:
            borders.append(min(window)[2])
            window = []
    if window and len(borders) < parts - 1:
        borders.append(min(window)[2])
    edges = [first, *(border + 1 for border in borders), last + 1]
    return tuple((start, end - 1) for start, end in pairwise(edges))
