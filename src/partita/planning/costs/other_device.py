"""Costs that were worked out for one device, for another."""

from __future__ import annotations

from dataclasses import replace

from partita.errors import PlanError
from partita.planning.costs.cost_model import CostModel
from partita.planning.costs.costed_for import CostedFor
from partita.planning.costs.units import Unit
from partita.planning.hardware.devices import Device

__all__ = ["costs_for_device"]


def costs_for_device(costs: CostModel, device: Device) -> CostModel:
    """The same costs with the seconds of another device.

    All seconds change as those of products of matrices of the model's dtype do, like the speeds of
    `Cluster.of_devices`. Passes that wait for memory differ from that: `measure_units(..., device=device)`
    works these out too, from the model.

    Args:
        costs: worked out for a device (`CostModel.costed_for`).
        device: the other one.

    Raises:
        PlanError: it is not known for which device the seconds are.

    >>> from partita.planning import get_device
    >>> of_a100 = CostedFor("A100", "bfloat16", 312e12)
    >>> costs = CostModel((Unit("block", 3.0, 6.0),), (), costed_for=of_a100)
    >>> round(costs_for_device(costs, get_device("B200")).units[0].forward_s, 3)
    0.416
    """
    before = costs.costed_for
    if before is None:
        raise PlanError(
            f"these costs do not say which device their seconds are for, so what they are on {device.name!r} "
            "is not known: work them out for it, with measure_units(..., device=...)"
        )
    speed = before.speed_of(device)
    return replace(
        costs,
        units=tuple(_faster(unit, speed) for unit in costs.units),
        costed_for=CostedFor(device.name, before.dtype, device.flops(before.dtype)),
    )


def _faster(unit: Unit, speed: float) -> Unit:
    halves = unit.backward_input_s, unit.backward_weight_s
    input_s, weight_s = (None if half is None else half / speed for half in halves)
    return replace(
        unit,
        forward_s=unit.forward_s / speed,
        backward_s=unit.backward_s / speed,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
    )
