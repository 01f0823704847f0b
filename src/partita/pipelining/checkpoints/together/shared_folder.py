"""A check that all ranks write to one directory, and not each host to its own of the same name."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.together.savers import Savers, agree, attempt

__all__ = ["check_shared"]

_PATIENCE_S = 5.0
"""How long a rank looks for another's file, which a network file system may show late."""

_PAUSE_S = 0.1


def check_shared(folder: Path, savers: Savers) -> None:
    """Check that every rank sees what the first one writes to ``folder``, and make that. Collective.

    Raises:
        CheckpointError: on all ranks: some see another directory, or it can't be made.
    """
    marker = folder / f".partita-{uuid.uuid4().hex}"
    _, problem = attempt(lambda: _put(marker) if savers.first else None, folder, "written")
    agree(savers, problem)
    name = next(name for name in savers.gather(marker.name if savers.first else None) if name)
    marker = folder / name
    hosts = savers.gather((socket.gethostname(), _sees(marker)))
    if savers.first:
        marker.unlink(missing_ok=True)
    blind = [(rank, host) for rank, (host, sees) in enumerate(hosts) if not sees]
    if blind:
        rank, host = blind[0]
        raise CheckpointError(
            f"rank {rank} (on {host}) does not see in {os.fspath(folder)!r} what rank 0 (on {hosts[0][0]}) "
            "has written there: each host has a directory of its own by that name, and none would hold the "
            "whole checkpoint. Give a directory that all hosts share"
        )


def _put(marker: Path) -> None:
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _sees(marker: Path) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while not marker.exists():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)
    return True
