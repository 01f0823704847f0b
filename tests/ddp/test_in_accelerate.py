"""A replicated module in a loop of accelerate's, as ``docs/ddp.md`` puts it there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.group_of_one import group_of_one
from torch import nn

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'partita[hf]'")

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from partita.ddp import replicate


def test_a_replicated_module_has_accelerates_mixed_precision_and_is_in_its_checkpoints(
    tmp_path: Path,
) -> None:
    """The page said not to prepare it: it trained in float32, and ``save_state`` left it out."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    expected = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = expected(x).float().square().mean()
    loss.backward()
    with group_of_one():
        try:
            accelerator = Accelerator(cpu=True, mixed_precision="bf16")
            replica = replicate(model)
            prepared = accelerator.prepare_model(replica, evaluation_mode=True)
            assert prepared is replica
            assert replica.training
            accelerator.backward(prepared(x).square().mean())
            accelerator.save_state(str(tmp_path))
            replica.replication.close()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    for here, there in zip(model.parameters(), expected.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        assert torch.equal(here.grad, there.grad)
    assert (tmp_path / "model.safetensors").exists()
