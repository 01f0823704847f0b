"""The memory of buckets."""

from __future__ import annotations

import torch
from torch import nn

from partita.ddp.buckets.bucket_layout import lay_out
from partita.ddp.buckets.reduction import BucketMemory


def test_memory_is_used_again_unless_somebody_keeps_a_part_of_it() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    (layout,) = lay_out(["a"], [parameter], [0], cap_bytes=1)
    memory = BucketMemory(layout)
    first = memory.take([parameter]).data_ptr()
    assert memory.take([parameter]).data_ptr() == first
    parameter.grad = memory.take([parameter])[:4]
    assert memory.take([parameter]).data_ptr() == first
    kept = parameter.grad
    parameter.grad = None
    assert memory.take([parameter]).data_ptr() != first
    assert kept.data_ptr() == first
