"""The benchmark of FSDP's communication: its arithmetic, and that every way trains the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.fsdp_overlap import _row, _table
from benchmarks.fsdp_ways import MODELS, WAYS, Setting
from benchmarks.fsdp_worker import checked_step, mean_gradients
from rich.console import Console
from tests.runtime.worlds import ProcessWorld, patience
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import fsdp_overlap
from partita.errors import UsageError
from partita.runtime import Comm

RESULT = {
    "megabits_per_s": {"unlimited": None, "1": 100.0},
    "seconds": {
        "unlimited/computing alone": [1.0, 1.0],
        "1/network alone": [1.5, 1.5],
        "unlimited/network alone": [0.5, 0.5],
        "1/eager": [2.5, 2.5],
        "unlimited/eager": [1.5, 1.5],
        "1/compiled, unmarked": [1.0, 1.0],
        "1/compiled, annotated": [2.0, 1.5],
        "unlimited/compiled, annotated": [1.5, 1.25],
    },
    "problems": {"compiled by block": "refused"},
}


def test_exposed_is_what_a_step_takes_beyond_the_one_on_links_without_a_limit() -> None:
    row = _row("llama", "1", "compiled, annotated", RESULT)
    assert (row.step_s, row.unlimited_s, row.compute_s, row.network_s) == (1.75, 1.375, 1.0, 1.5)
    assert row.exposed_s == 0.375
    ratios = (row.exposed_share, row.over_eager, row.over_unmarked)
    assert [ratio.median for ratio in ratios if ratio] == [0.375, 0.7, 1.75]


def test_a_way_that_does_not_run_has_its_reason_in_the_table() -> None:
    row = _row("llama", "1", "compiled by block", RESULT)
    assert (row.step_s, row.exposed_s, row.exposed_share, row.over_eager) == (None, None, None, None)
    assert _table([row]).caption == "compiled by block: refused"


def test_cells_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(_model: str, cells: Any, **_options: Any) -> list[Any]:
        asked.extend(cells)
        return []

    monkeypatch.setattr(fsdp_overlap, "measure", measure)
    fsdp_overlap.main(only=["llama/[12]/eager"], console=Console(quiet=True))
    assert asked == [("1", "eager"), ("2", "eager")]
    with pytest.raises(UsageError, match=r"'llama/3/\*' matches no cell; the first of 24 is 'llama/0.3/eage"):
        fsdp_overlap.main(only=["llama/3/*"], console=Console(quiet=True))


def refusals(_comm: Comm) -> tuple[dict[str, str], str]:
    """Why each way is refused ("": it has the model's gradients), and why one that takes another batch is."""
    sizes = MODELS["tiny"]
    setting = Setting(sizes, init_device_mesh("cpu", (2,)), "aot_eager")
    batch = sizes.batch(setting.mesh.get_rank())
    expected = mean_gradients(sizes, batch)

    def refusal(way: str, own_batch: torch.Tensor) -> str:
        try:
            checked_step(WAYS[way](setting), own_batch, expected)
        except ArithmeticError as error:
            return str(error)
        return ""

    return {way: refusal(way, batch) for way in WAYS}, refusal("eager", batch + 1)


@pytest.mark.dear
@pytest.mark.timeout(400)
def test_every_way_takes_its_steps_with_the_gradients_of_the_model() -> None:
    with patience(300.0):
        for of_ways, of_another_batch in ProcessWorld(2).run(refusals):
            assert of_ways == dict.fromkeys(WAYS, "")
            assert "the gradient of blocks.0.first.weight is off by" in of_another_batch
