from __future__ import annotations

import torch

from partita._torch.tensors.free_memory import free_bytes


def test_free_memory_is_a_number_of_bytes_or_unknown() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50


def test_a_device_without_memory_of_its_own_is_unknown() -> None:
    assert free_bytes(torch.device("meta")) is None
