"""Is a region worth capturing: launches saved against what a replay costs.

Without a graph each kernel costs the host one launch. With one, a replay costs one call, each input that has
no fixed address is copied in, and each output that lives on is copied out, many tensors in one launch::

    saved = launches x launch - (replay + copies x copy + bytes copied / bandwidth)
"""

from __future__ import annotations

from dataclasses import dataclass

from partita.errors import ArgumentError

__all__ = ["SavingModel"]


@dataclass(frozen=True)
class SavingModel:
    """Seconds of host time, and of copying. The defaults are near what one H200 machine took (torch 2.11): 5
    to 9 µs a launch, 1.8 a copy among 100, about 20 a region of two kernels beside its copies. Give your own.

    Attributes:
        launch_s: to launch one kernel from Python, dispatch included.
        replay_s: to launch a recorded graph, with the bookkeeping of one call.
        bandwidth: bytes a second of a copy on the device (each byte is read and written).
        min_launches: a region with fewer is never captured, whatever it would save.
        copy_s: to find memory for one tensor and to hand it to a copy of many.
    """

    launch_s: float = 6e-6
    replay_s: float = 20e-6
    bandwidth: float = 1e12
    min_launches: int = 2
    copy_s: float = 2e-6

    def __post_init__(self) -> None:
        if min(self.launch_s, self.copy_s, self.replay_s) < 0 or self.bandwidth <= 0:
            raise ArgumentError(
                f"launch_s ({self.launch_s}), copy_s ({self.copy_s}) and replay_s ({self.replay_s}) must not "
                f"be negative, and bandwidth ({self.bandwidth}) must be positive: all are of one device"
            )
        if self.min_launches < 0:
            raise ArgumentError(f"min_launches ({self.min_launches}) must not be negative")

    def saved_s(self, launches: int, copies: int = 0, copied_bytes: int = 0) -> float:
        """Return the seconds saved at each run; negative where it costs.

        >>> SavingModel(launch_s=1.0, copy_s=1.0, replay_s=2.0).saved_s(launches=10, copies=3)
        5.0
        """
        return launches * self.launch_s - (
            self.replay_s + copies * self.copy_s + copied_bytes / self.bandwidth
        )

    def is_worth_it(self, launches: int, copies: int = 0, copied_bytes: int = 0) -> bool:
        """Return whether to capture a region."""
        return launches >= self.min_launches and self.saved_s(launches, copies, copied_bytes) > 0
