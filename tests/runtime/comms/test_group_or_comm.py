"""The check of what a caller gives for the ranks to talk through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.group_of_one import group_of_one
from torch.distributed.device_mesh import init_device_mesh

from partita.errors import ArgumentError
from partita.runtime import InProcessWorld
from partita.runtime.comms.group_or_comm import check_group, check_group_or_comm


def test_each_alone_is_taken() -> None:
    check_group_or_comm(None, None)
    check_group_or_comm(dist.GroupMember.NON_GROUP_MEMBER, None)
    InProcessWorld(1).run(lambda comm: check_group_or_comm(None, comm))
    with group_of_one():
        check_group_or_comm(dist.group.WORLD, None)


def test_one_in_the_place_of_the_other_is_refused() -> None:
    def in_place_of_group(comm: Any) -> None:
        with pytest.raises(ArgumentError, match=r"group is of type InProcessComm.*: give it as comm=..."):
            check_group_or_comm(comm, None)
        with pytest.raises(
            ArgumentError, match=r"process_group is of type InProcessComm.*: leave process_group"
        ):
            check_group(comm, "process_group")  # where no comm is taken

    InProcessWorld(1).run(in_place_of_group)
    with group_of_one():
        with pytest.raises(ArgumentError, match=r"comm is of type .*: give it as group=..."):
            check_group_or_comm(None, dist.group.WORLD)
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(
            ArgumentError, match=r"group is of type DeviceMesh.*: give group=mesh.get_group\(\)"
        ):
            check_group_or_comm(mesh, None)
        check_group_or_comm(mesh.get_group(), None)
    with pytest.raises(ArgumentError, match=r"group is of type int.*: leave group out for the default group"):
        check_group_or_comm(3, None)
    with pytest.raises(ArgumentError, match="group is of type Tensor"):
        check_group_or_comm(torch.ones(2), None)
