"""Torch's logs of what it can't trace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["failure_logs_off"]

_LOGS = "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"


@contextmanager
def failure_logs_off() -> Iterator[None]:
    """Keep torch from logging the stacks of operators that fail without data. The error says what is wrong,
    and whoever tries shapes or ways of tracing goes on with others. A log at DEBUG level stays as it is.
    """
    logs = [logging.getLogger(name) for name in _LOGS]
    levels = [log.level for log in logs]
    for log in logs:
        if not log.isEnabledFor(logging.DEBUG):  # unless somebody looks for it
            log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
