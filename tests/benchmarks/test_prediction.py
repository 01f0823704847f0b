"""The benchmark of predictions runs; how true they are, nobody asserts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from benchmarks.prediction import main
from benchmarks.prediction_models import MODELS
from rich.console import Console


def test_the_quick_mode_runs_real_processes_and_writes_json(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    (row,) = main(quick=True, json_path=tmp_path / "prediction.json", console=console)
    assert row.predicted_s > 0.0
    assert row.step.rounds == 1
    assert len(row.predicted_bytes) == len(row.live_bytes) == 2
    assert all(size > 0 for size in (*row.predicted_bytes, *row.live_bytes))
    assert len(json.loads((tmp_path / "prediction.json").read_text())["rows"]) == 1
    assert "step / predicted" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODELS)
def test_each_model_can_be_trained(name: str) -> None:
    subject = MODELS[name](True)
    loss = subject.loss_fn(subject.model(*subject.args), subject.target)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in subject.model.parameters())
