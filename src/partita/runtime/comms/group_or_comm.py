"""What ranks talk through, where a caller may say it in two ways: a process group, or a comm."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from partita.errors import ArgumentError
from partita.runtime.comms.comm import Comm

__all__ = ["check_group", "check_group_or_comm"]


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
    check_group(group, "group")
    if comm is not None and not isinstance(comm, Comm):
        raise ArgumentError(f"comm is {_named(comm)}, and a Comm is needed here: {_other_way(comm, 'comm')}")


def check_group(group: Any, name: str) -> None:
    """Check that it is a process group, None, or what a rank has of one that it is no member of: it is told
    so where it uses that.

    Args:
        name: of the argument.

    Raises:
        ArgumentError: it is something else.
    """
    is_group = isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not is_group:
        raise ArgumentError(
            f"{name} is {_named(group)}, and a process group is needed here: {_other_way(group, name)}"
        )


def _named(value: object) -> str:
    return f"of type {type(value).__name__}"


def _other_way(value: object, name: str) -> str:
    if name == "group" and isinstance(value, Comm):
        return "give it as comm=..."
    if name == "comm" and isinstance(value, dist.ProcessGroup):
        return "give it as group=..."
    if isinstance(value, DeviceMesh):
        return f"give {name}=mesh.get_group(), of the dimension of the mesh along which these ranks lie"
    return f"leave {name} out for the default group"
