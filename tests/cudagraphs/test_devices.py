"""A model on several devices: each has regions and a recorder of its own. The devices are pretended: the
graph says where its values lie, and runs on the CPU.
"""

from __future__ import annotations

import torch
from tests.cudagraphs.capturing import AllWorthIt
from tests.cudagraphs.graphs import Builder, aten
from torch.fx import GraphModule

from partita.cudagraphs import CudaGraphsBackend, ReplayRecorder, find_regions

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Pretended(ReplayRecorder):
    """Says that it is for a GPU, until ``device_type`` is set back."""

    device_type = "cuda"


def hop(x: torch.Tensor) -> torch.Tensor:
    """Stands for a copy to the other device."""
    return x.clone()


def graph() -> GraphModule:
    """Two chains, one a device, that exchange a value in the middle."""
    b = Builder()
    x, y = b.input("x", b.fake(4, device=FIRST)), b.input("y", b.fake(4, device=SECOND))
    x, y = (
        b.call(aten.cos.default, b.call(aten.sin.default, x)),
        b.call(aten.exp.default, b.call(aten.neg.default, y)),
    )
    there = b.call(hop, x, value=b.fake(4, device=SECOND))
    back = b.call(hop, y, value=b.fake(4, device=FIRST))
    y = b.call(aten.sin.default, b.call(aten.add.Tensor, y, there))
    x = b.call(aten.cos.default, b.call(aten.mul.Tensor, x, back))
    return b.module(x, y)


def test_a_region_is_of_one_device() -> None:
    plan = find_regions(graph())
    regions = [(region.device, region.launches) for region in plan.regions]
    assert regions[:2] == [(FIRST, 2), (SECOND, 2)]
    assert sorted(map(str, regions[2:])) == sorted(map(str, regions[:2]))


def test_each_device_has_a_recorder_and_replays_are_right() -> None:
    recorders: dict[torch.device, Pretended] = {}

    def make(device: torch.device) -> Pretended:
        return recorders.setdefault(device, Pretended())

    whole, backend = graph(), CudaGraphsBackend(recorder=make, saving=AllWorthIt())
    captured = backend.capture(whole)
    del recorders[torch.device("cpu")]  # the backend asked one what it records
    assert recorders.keys() == {FIRST, SECOND}
    for recorder in recorders.values():
        recorder.device_type = "cpu"
    earlier = []
    for step in range(5):
        x, y = torch.randn(4), torch.randn(4)
        earlier.append((captured(x, y), whole(x, y)))
        assert all(torch.equal(*both) for pair in earlier for both in zip(*pair, strict=True)), step
    assert [(one.recorded, one.replayed) for one in recorders.values()] == [(2, 8), (2, 8)]
    assert recorders[FIRST].pools is not recorders[SECOND].pools
