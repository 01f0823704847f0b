from __future__ import annotations

import json
from pathlib import Path

from benchmarks import pipeline_memory


def test_it_measures_each_rank_and_writes_json(tmp_path: Path) -> None:
    found = pipeline_memory.main(quick=True, json_path=tmp_path / "figures.json")
    assert [row.rank for row in found] == [0, 1]
    for row in found:
        # two layers of 64, their gradients and two averages; GPipe keeps all 8 microbatches
        assert row.needed > 4 * 2 * 64 * 65 * 4
        assert 0 < row.activations < row.needed
        assert row.peak >= 0
    assert len(json.loads((tmp_path / "figures.json").read_text())["rows"]) == 2
