"""A run of neighbouring units as a stage of a plan."""

from __future__ import annotations

from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.recompute import Regions, recomputed_cost
from partita.planning.costs.spanning import NOTHING_SHARED, SharedOnRank
from partita.planning.plan import StagePlan

__all__ = ["make_stage"]


def make_stage(
    costs: CostModel,
    index: int,
    first_unit: int,
    last_unit: int,
    *,
    regions: Regions = (),
    time_s: float = 0.0,
    peak_bytes: int = 0,
    shared: SharedOnRank = NOTHING_SHARED,
    tied: tuple[tuple[int, int], ...] = (),
    summed: tuple[tuple[int, tuple[int, ...]], ...] = (),
) -> StagePlan:
    """Stage number `index`, of the units from `first_unit` to `last_unit`, of which `regions` are recomputed.

    Args:
        time_s: see `StagePlan`.
        peak_bytes: see `StagePlan`.
        shared: as in `recomputed_cost`.
        tied: see `StagePlan.tied_gradients`.
        summed: see `StagePlan.summed_gradients`.
    """
    units = costs.units[first_unit : last_unit + 1]
    cost = recomputed_cost(costs, first_unit, last_unit, shared=shared)
    recomputed = recomputed_cost(costs, first_unit, last_unit, regions, shared=shared) if regions else None
    return StagePlan(
        index=index,
        first_unit=first_unit,
        last_unit=last_unit,
        units=tuple(unit.name for unit in units),
        modules=tuple(module for unit in units for module in unit.modules),
        parameters=costs.parameters(first_unit, last_unit),
        parameter_bytes=costs.parameter_bytes(first_unit, last_unit),
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        send_bytes=cost.send_bytes,
        send_grad_bytes=cost.send_grad_bytes or 0,
        activation_bytes=cost.activation_bytes,
        backward_input_s=cost.backward_input_s,
        backward_weight_s=cost.backward_weight_s,
        weight_activation_bytes=cost.weight_activation_bytes,
        forward_workspace_bytes=cost.forward_workspace_bytes,
        backward_workspace_bytes=cost.backward_workspace_bytes,
        input_workspace_bytes=cost.input_workspace_bytes,
        weight_workspace_bytes=cost.weight_workspace_bytes,
        arriving_bytes=cost.arriving_bytes,
        arriving_gradient_bytes=cost.arriving_gradient_bytes,
        returned_gradient_bytes=cost.returned_gradient_bytes,
        tied_gradients=tied,
        handed_gradients=cost.handed_gradients,
        summed_gradients=summed,
        sent_values=cost.sent_values,
        recompute=regions,
        recomputed=recomputed,
        time_s=time_s,
        peak_bytes=peak_bytes,
    )
