"""What one stage hands to the next, as messages between ranks."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from partita.errors import ExecutionError
from partita.pipelining.blocks.packet import Gradients, Packet, first_packet, sharing_memory
from partita.pipelining.blocks.transfer import receive_bundle, send_bundle
from partita.runtime import Comm, Handle, InProcessWorld

CPU = torch.device("cpu")
TENSORS = {
    "contiguous": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "with gaps": torch.arange(12.0)[::2],
    "unaligned": torch.arange(9.0)[1:],
    "unaligned slice, large": torch.zeros(300, 9)[:, 1:],
    "expanded": torch.arange(3.0)[:, None].expand(3, 4),
    "one value, expanded": torch.tensor(2.5).expand(3, 4),
    "one value, expanded far": torch.tensor(2.5).expand(2000, 4),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "whole numbers": torch.arange(3),
    "truths": torch.tensor([True, False]),
    "lazily conjugate": torch.tensor([[1 + 2j, 3 - 1j]]).mH,
    "lazily negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "large and lazily conjugate": torch.full((2000,), 1 + 2j).conj(),
}


def arrived(bundle: Packet | Gradients) -> Packet | Gradients:
    """What rank 1 receives when rank 0 sends it."""

    def body(comm: Comm) -> Packet | Gradients | None:
        handles: list[Handle] = []
        if comm.rank == 0:
            handles, received = send_bundle(comm, bundle, 1, tag=3, device=CPU), None
        else:
            received = receive_bundle(comm, 0, 3, CPU, handles)
        for handle in handles:
            handle.wait()
        return received

    received = InProcessWorld(2).run(body)[1]
    assert received is not None
    return received


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_gradient_arrives_with_its_strides_and_alignment(tensor: Tensor) -> None:
    received = arrived(Gradients({7: tensor})).values[7]
    assert torch.equal(received, tensor)
    assert (received.dtype, received.stride()) == (tensor.dtype, tensor.stride())
    assert received.data_ptr() % 64 == tensor.data_ptr() % 64 or not tensor.numel()


def test_arguments_arrive_with_what_is_no_tensor() -> None:
    leaf = torch.ones(2, requires_grad=True)
    packet = first_packet((leaf, "relu", [3]), {"mask": None, "bias": torch.zeros(1)}, live=False)
    received = arrived(packet)
    assert isinstance(received, Packet)
    assert (received.structure, received.tensors) == (packet.structure, 2)
    assert [leaf for leaf in received.arguments if isinstance(leaf, (str, int))] == ["relu", 3]
    assert [value.requires_grad for value in received.values.values()] == [True, False]
    assert received.sites == {0: ("argument", 0), 1: ("argument", 1)}


def test_what_can_not_be_pickled_is_an_error_that_says_so() -> None:
    packet = first_packet((threading.Lock(),), {}, live=False)
    with pytest.raises(ExecutionError, match="give the model arguments that can be pickled"):
        InProcessWorld(1).run(lambda comm: send_bundle(comm, packet, 0, tag=0, device=CPU))


def test_tensors_that_share_memory_are_told() -> None:
    base = torch.arange(4.0)
    values = {0: base[:2], 1: torch.ones(2), 2: base[2:], 3: torch.empty(0), 4: torch.empty(0)}
    assert sharing_memory(values) == {0, 2}


@pytest.mark.parametrize("size", [3, 5000])
def test_what_lies_on_the_host_beside_a_stage_elsewhere_is_received_there(size: int) -> None:
    """The meta device stands for a GPU."""
    meta = torch.device("meta")

    def body(comm: Comm, sender: torch.device) -> Packet | Gradients | None:
        handles: list[Handle] = []
        if comm.rank == 0:
            handles, received = send_bundle(comm, Gradients({0: torch.ones(size)}), 1, 3, sender), None
        else:
            received = receive_bundle(comm, 0, 3, meta if sender == meta else CPU, handles)
        for handle in handles:
            handle.wait()
        return received

    for sender in (meta, CPU):
        received = InProcessWorld(2).run(body, sender)[1]
        assert torch.equal(received.values[0], torch.ones(size))
