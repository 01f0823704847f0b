"""The device that the seconds of costs were worked out for."""

from __future__ import annotations

from dataclasses import dataclass

from partita.planning._check import require_rate
from partita.planning.hardware.devices import Device

__all__ = ["CostedFor"]


@dataclass(frozen=True)
class CostedFor:
    """The device that the seconds of a `CostModel` were worked out for.

    Attributes:
        device: its name.
        dtype: of most of the model's parameters.
        flops_per_s: the device's operations per second with that dtype.

    Raises:
        PlanError: a speed of zero.
    """

    device: str
    dtype: str
    flops_per_s: float

    def __post_init__(self) -> None:
        require_rate(self.flops_per_s, f"flops_per_s of device {self.device!r}")

    def speed_of(self, device: Device) -> float:
        """How fast another device computes beside this one: as with products of matrices of the dtype."""
        return device.flops(self.dtype) / self.flops_per_s
