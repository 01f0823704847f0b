"""The benchmark of CUDA graphs runs; how fast, nobody asserts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.cudagraphs_speed import inductor_graphs, main
from rich.console import Console

from partita.errors import UsageError


@pytest.mark.dear
def test_the_quick_mode_measures_every_case_and_writes_json(tmp_path: Path) -> None:
    rows = main(quick=True, json_path=tmp_path / "speed.json", console=Console(quiet=True))
    assert len({row.case for row in rows}) == 4
    assert all(row.milliseconds is not None for row in rows if row.side in ("eager", "partita")), rows
    assert all(row.regions for row in rows if row.side == "partita")
    written = json.loads((tmp_path / "speed.json").read_text())
    assert written["benchmark"] == "cudagraphs_speed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_only_the_quick_mode_runs() -> None:
    with pytest.raises(UsageError, match="this benchmark needs a CUDA device"):
        main()


def test_cells_can_be_chosen() -> None:
    rows = main(quick=True, only=["forward/eager"], console=Console(quiet=True))
    assert [(row.case, row.side) for row in rows] == [("forward", "eager")]
    with pytest.raises(UsageError, match="matches no cell; the first of 8 is 'forward/eager'"):
        main(quick=True, only=["backward/*"])


@pytest.mark.parametrize("partition", [True, False])
def test_torch_takes_the_options_of_its_own_cuda_graphs(partition: bool) -> None:
    """Compiling is lazy, but torch.compile refuses an option that Inductor has not, or of another type."""
    side = inductor_graphs("torch's", partition=partition)
    model = torch.nn.Linear(2, 2)
    assert callable(side.compile(model))
    assert side.regions(3) == (3 if partition else None)
