"""The benchmark of predictions runs; how true they are, nobody asserts."""

from __future__ import annotations

import pytest
import torch
from benchmarks.prediction_models import MODELS, UNEVEN


@pytest.mark.parametrize("name", {**MODELS, **UNEVEN})
def test_each_model_can_be_trained(name: str) -> None:
    subject = {**MODELS, **UNEVEN}[name](True)
    loss = subject.loss_fn(subject.model(*subject.args), subject.target)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in subject.model.parameters())
