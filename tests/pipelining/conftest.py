from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.runtime import worlds

# Processes are forked off a server that has the imports done.
worlds._CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.pipelining", "torch.export._trace", "partita.pipelining"]
)


@pytest.fixture(autouse=True)
def _quiet_copies() -> Iterator[None]:
    """torch's own pytree specs warn about their class whenever a captured graph is copied or pickled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
