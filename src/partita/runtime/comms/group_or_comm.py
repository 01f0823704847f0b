"""What ranks talk through, where a caller may say it in two ways: a process group, or a comm."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from partita.errors import ArgumentError
from partita.runtime.comms.comm import Comm

__all__ = ["check_group_or_comm"]


def check_group_or_comm(group: Any, comm: Any) -> None:
    """Check that at most one of the two is there, and that each is what its name says.

    Raises:
        ArgumentError: both are there, ``group`` is no process group, or ``comm`` is no `Comm`.

    >>> from partita.runtime import InProcessWorld
    >>> InProcessWorld(1).run(lambda comm: check_group_or_comm(None, comm))
    [None]
    """
    if group is not None and comm is not None:
        raise ArgumentError("a stage talks through a process group or a comm, not both: give one of them")
    is_member = group != dist.GroupMember.NON_GROUP_MEMBER  # others are told so where the group is used
    if group is not None and is_member and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"group is {_named(group)}, and a process group is needed here: {_other_way(group, 'group')}"
        )
    if comm is not None and not isinstance(comm, Comm):
        raise ArgumentError(f"comm is {_named(comm)}, and a Comm is needed here: {_other_way(comm, 'comm')}")


def _named(value: object) -> str:
    return f"of type {type(value).__name__}"


def _other_way(value: object, name: str) -> str:
    if isinstance(value, Comm):
        return "give it as comm=..."
    if isinstance(value, dist.ProcessGroup):
        return "give it as group=..."
    if isinstance(value, DeviceMesh):
        return "give group=mesh.get_group(), of the mesh's dimension along which the stages lie"
    return f"leave {name} out for the default group"
