"""Values that are no tensors, as bytes: plain data, which no code has to run for."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import torch

from partita.errors import CheckpointError

__all__ = ["check_plain", "plain_bytes", "plain_value"]

_ALLOWED = (bool, int, float, str, bytes, type(None))
_KINDS = "numbers, text, bytes, tensors, and lists, tuples and dicts of these"


def check_plain(value: Any, what: str) -> None:
    """Check that a value comes back from `plain_value`.

    Raises:
        CheckpointError: code would have to run for it.
    """
    if type(value) in _ALLOWED or (type(value) is tuple and all(type(item) in _ALLOWED for item in value)):
        return
    plain_bytes(value, what, allow_pickle=False)


def plain_bytes(value: Any, what: str, *, allow_pickle: bool) -> bytes:
    """What ``torch.save`` makes of a value.

    Args:
        what: what the value is, for the message.
        allow_pickle: pickle anything that can be pickled.

    Raises:
        CheckpointError: it can't be saved, or not as plain data.
    """
    buffer = BytesIO()
    try:
        torch.save(value, buffer)
        if not allow_pickle:
            torch.load(BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:  # pickling runs the value's own code
        can = "which can't be saved" if allow_pickle else "which can't be saved as plain data"
        cure = "give plain values" + (
            "" if allow_pickle else ", or pass allow_pickle=True to save and load a pickle"
        )
        raise CheckpointError(
            f"{what} is a {type(value).__name__}, {can} ({_KINDS}): {cure} ({str(error)[:200]})"
        ) from error
    return buffer.getvalue()


def plain_value(stream: BytesIO, what: str, *, allow_pickle: bool) -> Any:
    """What `plain_bytes` or ``torch.save`` wrote.

    Args:
        what: what the value is, for the message.
        allow_pickle: load anything, whatever code that runs.

    Raises:
        CheckpointError: it is no plain data, or damaged.
    """
    try:
        return torch.load(stream, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:  # damaged pickles raise all kinds
        raise CheckpointError(
            f"{what} is damaged, or no plain data ({_KINDS}), so code would run to load it: take another "
            f"checkpoint, or pass allow_pickle=True if you know who wrote it ({str(error)[:200]})"
        ) from error
