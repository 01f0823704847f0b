"""Publishing an error to the other ranks before it is raised, so that none waits for a rank that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from partita.errors import SignatureMismatch
from partita.runtime.comms.comm import Comm
from partita.runtime.failures.thread_activity import doing

__all__ = ["closed_on_error", "publish_errors"]


@contextmanager
def publish_errors(comm: Comm, where: str, alike: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Publish what the block raises to the other ranks first. Ranks that wait for this one meanwhile are told
    that it is in this block.

    Args:
        where: what this rank is doing, in words for the others.
        alike: errors that every rank raises by itself. They are not published, so that each rank gets its own
            in place of a `PeerFailed`.
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
    """Publish what the block raises, as `publish_errors` does, and close the comm, opened for it, too."""
    try:
        with publish_errors(comm, where, alike):
            yield
    except BaseException:
        comm.close()
        raise
