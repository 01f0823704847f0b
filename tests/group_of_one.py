"""A process group of one rank, in the test's own process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make the default group, and destroy it when nobody else holds it.

    Torch's DistributedDataParallel must be gone before: where its reducer is the last to let go of the group,
    gloo's threads are joined by a thread that holds the interpreter's lock, and one of them may wait for it.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()
