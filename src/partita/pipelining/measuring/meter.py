"""Where seconds come from: a clock, events of a device, or a roofline. The caller need not know."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from partita._torch.operators.fused_attention import FusedAttention
from partita._torch.operators.roofline import FixedSpeeds, Speeds, roofline_seconds
from partita._torch.tensors.storage import has_memory

__all__ = ["CLOCK", "DeviceEvent", "Meter", "event_meter", "meter_for", "roofline"]

T = TypeVar("T")


class _Timed(Protocol):
    def __call__(self, call: Callable[[], T], /) -> tuple[T, float]: ...


@dataclass(frozen=True)
class Meter:
    """Calls functions and tells how long they take.

    Attributes:
        timed: calls a function; returns its result and the seconds that it took.
        is_exact: whether it tells the same each time, so that once is enough.
        keeps_waiting: whether what is in memory meanwhile makes a difference, so that a microbatch is to be
            there as in a step.
    """

    timed: _Timed
    is_exact: bool = False
    keeps_waiting: bool = False


def _by_clock(call: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


CLOCK = Meter(_by_clock, keeps_waiting=True)
"""Of the host: right where a function has done its work when it returns."""


class DeviceEvent(Protocol):
    """A mark in a device's queue of work, as ``torch.cuda.Event``."""

    def record(self) -> Any:
        """Put the mark behind what has been queued."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this mark to another one."""


def event_meter(new_event: Callable[[], DeviceEvent], synchronise: Callable[[], object]) -> Meter:
    """A meter for a device that works through a queue: time passes between two marks in the queue.

    Args:
        new_event: makes a mark.
        synchronise: waits until the device has done all of its work.
    """

    def timed(call: Callable[[], T]) -> tuple[T, float]:
        start, end = new_event(), new_event()
        synchronise()  # what was queued before is not measured
        start.record()
        result = call()
        end.record()
        synchronise()
        return result, start.elapsed_time(end) / 1000.0

    return Meter(timed)


def roofline(speeds: Speeds) -> Meter:
    """A meter that works seconds out of shapes and dtypes, for a device that need not be there."""

    def timed(call: Callable[[], T]) -> tuple[T, float]:
        with FusedAttention():
            return roofline_seconds(call, speeds)

    return Meter(timed, is_exact=True)


def meter_for(tensors: Iterable[Any], speeds: Speeds | None = None) -> Meter:
    """The meter for a model with these tensors.

    Args:
        speeds: of the device to work out seconds for. Without it: events where there is a device with a
            queue; a roofline with the speeds of no particular device where a tensor has no memory, good for
            ratios only; the clock otherwise.
    """
    if speeds is not None:
        return roofline(speeds)
    own = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if not all(map(has_memory, own)):
        return roofline(FixedSpeeds())
    device = next((tensor.device for tensor in own if tensor.device.type != "cpu"), None)
    if device is None:
        return CLOCK
    return event_meter(
        lambda: torch.Event(device, enable_timing=True), lambda: torch.accelerator.synchronize(device)
    )
