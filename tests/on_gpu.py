"""What tests on a GPU share: the mark, and cases whose tensors are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.pipelining.models import Case

from partita._torch.containers.pytree import tree_map

DEVICE = "cuda"

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEEDS_CUDA = pytest.mark.skipif(
    torch.version.cuda is None,
    reason="the host's CUDA device (tools/host_cuda) is slow, and has no NCCL, Triton or gloo",
)
"""What the device of ``make gpu-on-host`` can't do."""


def moved(value: Any, device: str) -> Any:
    """The same structure, with its tensors on the device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def on_gpu(case: Case) -> Case:
    """The same weights and batches as on the CPU."""
    return replace(
        case,
        make=lambda: case.make().to(DEVICE),
        batch=lambda samples: moved(case.batch(samples), DEVICE),
    )
