"""The process-wide settings of torch that a model can change and forget to put back.

Each setting is a value with a reader and, but for inference mode, a writer. Inference mode can only be
entered and left: `preserved` holds an entry of its own around what may leak, and leaving that entry resets
whatever was left open inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.autograd.region_switches import AUTOCAST_DEVICES, autocast_nesting, set_autocast_nesting

__all__ = ["INFERENCE_MODE", "capture", "preserved", "restore"]


@dataclass(frozen=True)
class _Setting:
    name: str
    read: Callable[[], object]
    write: Callable[[Any], object]


def _autocast(device: str) -> list[_Setting]:
    return [
        _Setting(
            f"autocast on {device}",
            lambda: torch.is_autocast_enabled(device),
            lambda value: torch.set_autocast_enabled(device, value),
        ),
        _Setting(
            f"autocast dtype on {device}",
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    ]


def _set_deterministic(mode: tuple[bool, bool]) -> None:
    enabled, warn_only = mode
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_default_device(device: torch.device) -> None:
    """Set no default device for the CPU: that is the same, and no mode watches every operation then."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _flag(name: str, holder: object, attribute: str) -> _Setting:
    return _Setting(
        name,
        lambda: getattr(holder, attribute),
        lambda value: setattr(holder, attribute, value),
    )


INFERENCE_MODE = "inference mode"

_SETTINGS = (
    _Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    *(setting for device in AUTOCAST_DEVICES for setting in _autocast(device)),
    _Setting("open autocast regions", autocast_nesting, set_autocast_nesting),
    _Setting("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    _Setting(
        "deterministic algorithms (enabled, warn only)",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    _Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("default device", torch.get_default_device, _set_default_device),
    _Setting(
        "float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    _Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Setting("threads", torch.get_num_threads, torch.set_num_threads),
    _flag("fill of uninitialised memory", torch.utils.deterministic, "fill_uninitialized_memory"),
    _flag("cudnn", torch.backends.cudnn, "enabled"),
    _flag("cudnn benchmark", torch.backends.cudnn, "benchmark"),
    _flag("cudnn deterministic", torch.backends.cudnn, "deterministic"),
)


def capture() -> dict[str, object]:
    """Every setting by name, in a fixed order.

    >>> capture()["grad mode"]
    True
    """
    values: dict[str, object] = {INFERENCE_MODE: torch.is_inference_mode_enabled()}
    values.update((setting.name, setting.read()) for setting in _SETTINGS)
    return values


def restore(values: Mapping[str, object]) -> None:
    """Write back what `capture` read, where it differs now. Inference mode is left to `preserved`."""
    for setting in _SETTINGS:
        if setting.read() != values[setting.name]:
            setting.write(values[setting.name])


@contextmanager
def preserved() -> Iterator[None]:
    """Run a block under the current settings, and restore them afterwards, whatever the block changes."""
    values = capture()
    try:
        # Entering inference mode, on or off, changes the grad mode too: `restore` puts that right.
        with torch.inference_mode(bool(values[INFERENCE_MODE])):
            restore(values)
            yield
    finally:
        restore(values)
        if torch.is_autocast_cache_enabled():
            # Casts of the copies' weights would live as long as the caller's own autocast region.
            torch.clear_autocast_cache()
