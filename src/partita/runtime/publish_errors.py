"""Errors that other ranks have to hear of: told before they are raised, so that nobody waits for a rank that
has given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from partita.errors import SignatureMismatch
from partita.runtime.comm import Comm
from partita.runtime.whereabouts import doing

__all__ = ["closed_on_error", "publish_errors"]


@contextmanager
def publish_errors(comm: Comm, where: str, alike: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Whatever the block raises is published to the other ranks first. Where they wait for this one
    meanwhile, they are told that it is here.

    Args:
        where: what this rank was doing, in words that the others are shown.
        alike: errors that every rank raises by itself. They are not told, so that each rank gets its own in
            place of a PeerFailed.
    """
    try:
        with doing(where):
            yield
    except BaseException as error:
        if not isinstance(error, alike):
            comm.fail(error, where)
        raise


@contextmanager
def closed_on_error(
    comm: Comm, where: str, alike: tuple[type[Exception], ...] = (SignatureMismatch,)
) -> Iterator[None]:
    """The block makes what the comm was opened for. Where it can't, the error is told and the comm closed.
    Arguments are those of `publish_errors`.
    """
    try:
        with publish_errors(comm, where, alike):
            yield
    except BaseException:
        comm.close()
        raise
