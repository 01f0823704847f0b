"""Python objects as messages of a fixed size, and a second one where they are large."""

from __future__ import annotations

import pytest
import torch

from partita.runtime.comms._objects import HEADER_BYTES, as_tensor, pack, rest_bytes, unpack


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
