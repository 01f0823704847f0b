"""The benchmark of CUDA graphs runs; how fast, nobody asserts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.cudagraphs_speed import main
from rich.console import Console

from partita.errors import UsageError


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
