"""What torch itself logs, apart from what a model prints."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TextIO

from torch._logging._internal import handlers

__all__ = ["torch_logs_to"]


@contextmanager
def torch_logs_to(stream: TextIO) -> Iterator[None]:
    """Let torch's logs go to ``stream`` where they would go to what ``sys.stderr`` is now.

    Since 2.14 they follow ``sys.stderr``; before, they stay with the stream that it was when torch was
    imported.
    """
    followers = [handler for handler in handlers if getattr(handler, "stream", None) is sys.stderr]
    filters = [partial(_write_instead, handler, stream) for handler in followers]
    for handler, write in zip(followers, filters, strict=True):
        handler.addFilter(write)
    try:
        yield
    finally:
        for handler, write in zip(followers, filters, strict=True):
            handler.removeFilter(write)


def _write_instead(handler: logging.Handler, stream: TextIO, record: logging.LogRecord) -> bool:
    stream.write(f"{handler.format(record)}\n")
    return False
