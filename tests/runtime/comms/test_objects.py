"""Python objects as messages of a fixed size, and a second one where they are large."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from partita.runtime.comms._objects import HEADER_BYTES, as_tensor, pack, pickled, rest_bytes, unpack


@pytest.mark.parametrize("size", [0, 1, 900, 1000, 1001, 1002, 1003, 1004, 1005, 1100, 100_000])
def test_an_object_arrives_as_it_was_sent(size: int) -> None:
    sent = bytes(range(256)) * (size // 256) + bytes(size % 256)
    header, *rest = pack(sent)
    assert len(header) == HEADER_BYTES
    assert rest_bytes(header) == sum(map(len, rest))
    assert unpack(header, rest[0] if rest else bytearray()) == sent


def test_a_tensor_shares_the_memory_of_its_message() -> None:
    message = bytearray(4)
    as_tensor(message).copy_(torch.tensor([1, 2, 3, 4]))
    assert message == bytes([1, 2, 3, 4])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float8_e4m3fn, torch.uint16, torch.complex32], ids=lambda dtype: str(dtype)
)
def test_tensors_of_any_dtype_arrive(dtype: torch.dtype) -> None:
    tensor = torch.arange(8, dtype=torch.float32).to(dtype)
    sent = {"rows": tensor.reshape(2, 4).t(), "one": tensor[3], "none": tensor[:0], "leaf": nn.Buffer(tensor)}
    arrived = pickle.loads(pickled(sent))
    for name, value in sent.items():
        got = arrived[name]
        assert (got.dtype, got.shape, type(got)) == (value.dtype, value.shape, type(value))
        assert got.tolist() == value.tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_leaf_stays_one() -> None:
    leaf = torch.ones(2, dtype=torch.complex32, requires_grad=True)
    assert pickle.loads(pickled(leaf)).requires_grad
