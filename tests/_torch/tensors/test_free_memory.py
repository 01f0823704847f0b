from __future__ import annotations

import torch

from partita._torch.tensors.free_memory import free_bytes, too_little


def test_free_memory_is_a_number_of_bytes_or_unknown() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50


def test_a_device_without_memory_of_its_own_is_unknown() -> None:
    assert free_bytes(torch.device("meta")) is None


def test_the_device_that_has_too_little_is_named_and_one_that_can_not_tell_has_enough() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert too_little(1 << 60, [meta]) is None
    short = too_little(1 << 60, [meta, cpu])
    assert short is None if free_bytes(cpu) is None else short is not None and short[0] == cpu
