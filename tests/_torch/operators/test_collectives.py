"""Calls of other ranks are told before they are made."""

from __future__ import annotations

import torch
import torch.distributed as dist

from partita._torch.operators.collectives import before_collectives


def test_a_sum_over_ranks_is_told_and_arithmetic_is_not() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    value, names = torch.ones(2), list[str]()
    try:
        with before_collectives(names.append):
            value *= 2
            assert not names
            dist.all_reduce(value)
    finally:
        dist.destroy_process_group()
    assert names == ["c10d::allreduce_"]
