"""The memory of buckets."""

from __future__ import annotations

from typing import Any

import torch
from tests.ddp.alone import alone
from torch import nn

from partita.ddp.buckets.bucket_layout import lay_out
from partita.ddp.buckets.reduction import BucketMemory, PassFlags, Reduction
from partita.runtime import Comm, Handle
from partita.runtime.weight_sample import SAMPLE_FLAGS


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


def test_a_comm_hook_is_given_gradients_alone_so_that_flags_arrive_whatever_it_makes_of_them() -> None:
    """A low rank in place of the bucket turned zeros among the flags into other numbers, which read as "the
    backward pass raised on rank"; a scale that a hook took from the largest number was that of a flag.
    """
    sizes = []

    def mixes(flat: torch.Tensor, comm: Comm) -> Handle:
        sizes.append(flat.numel())
        flat.fill_(0.5)
        return comm.all_reduce(flat, (0,))

    def body(comm: Any) -> Reduction:
        parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        (layout,) = lay_out(["used", "unused"], parameters, [0, 1], cap_bytes=99)
        reduction = Reduction(
            BucketMemory(layout),
            parameters,
            {0: torch.ones(2)},
            {0: True, 1: False},
            comm,
            mixes,
            flags=PassFlags(went_well=True),
            sample=torch.arange(SAMPLE_FLAGS) % 2,
        )
        reduction.wait()
        reduction.hand_back()
        assert torch.equal(parameters[0].grad, torch.full((2,), 0.5))
        assert parameters[1].grad is None
        return reduction

    assert alone(body).flagged().tolist() == [0, 0, 1, *[0, 1] * (SAMPLE_FLAGS // 2)]
    assert sizes == [5]
