from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from tests.runtime import worlds

# Processes are forked off a server that has the imports done.
worlds._CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.pipelining", "torch.export._trace", "partita.pipelining"]
)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, which torch's stages need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
