"""Settings that must be equal on all ranks: compared before anything else is sent, so that a difference is an
error with both sides in it, on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from partita.errors import SignatureMismatch
from partita.runtime.comms.comm import Comm

__all__ = ["check_same", "digest", "refuse_differences", "short_digest"]


def check_same(comm: Comm, settings: Mapping[str, str]) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        settings: names and values in words. A name that a rank does not have is one left out there.

    Raises:
        SignatureMismatch: the message names the first difference; on every rank.
    """
    refuse_differences(comm.all_gather_object(dict(settings)))


def refuse_differences(said: Sequence[Mapping[str, str]]) -> None:
    """Raise as `check_same` does, for settings that have been gathered already.

    Args:
        said: the settings of each rank.
    """
    for rank, other in enumerate(said):
        for name in {**said[0], **other}:
            first, value = said[0].get(name, "left out"), other.get(name, "left out")
            if value != first:
                raise SignatureMismatch(
                    f"{name} is {first} on rank 0 and {value} on rank {rank}: make them equal, by "
                    "broadcasting rank 0's where a rank can't know it"
                )


def digest(content: str | bytes) -> int:
    """Return a 64-bit hash of a text, or of bytes, that is the same in every process."""
    data = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), signed=True)


def short_digest(text: str, digits: int) -> str:
    """Return so many (at most 16) hexadecimal digits of a hash that is the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()[:digits]
