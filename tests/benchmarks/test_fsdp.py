"""The benchmark of sharded training: its arithmetic, the gradients of its ways, and that it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.ddp_models import MODELS, make_model
from benchmarks.fsdp_ways import ANNOTATED, EAGER, WAYS, Setting, remove_marks
from tests.runtime.worlds import ProcessWorld, patience
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import fsdp_overlap
from partita.fsdp import annotate_modules_for_dynamo, audit


def test_what_is_exposed_is_measured_against_computing_in_the_same_mode() -> None:
    item: dict[str, Any] = {
        "relation": 1.0,
        "megabits_per_s": 100.0,
        "seconds": {
            "alone": [1.0, 1.0],
            "alone in eager mode": [1.5, 1.5],
            "network": [2.0, 2.0],
            EAGER: [3.0, 3.0],
            ANNOTATED: [2.0, 2.0],
        },
        "problems": {"compiled, not annotated": "refused"},
        "graphs": {EAGER: 0, ANNOTATED: 1},
        "guards": {EAGER: 0, ANNOTATED: 7},
    }
    eager, annotated, refused = fsdp_overlap._rows("mlp", 2, item)
    assert (eager.exposed_s, eager.exposed_share) == (1.5, 0.75)
    assert (annotated.exposed_s, annotated.exposed_share) == (1.0, 0.5)
    assert eager.over_annotated is not None
    assert eager.over_annotated.median == 1.5
    assert (annotated.graphs, annotated.guards) == (1, 7)
    assert (refused.step_s, refused.graphs, refused.problem) == (None, None, "refused")
    assert fsdp_overlap._table([eager, annotated, refused]).caption == "compiled, not annotated: refused"


def test_without_marks_no_module_is_managed() -> None:
    model = make_model(MODELS["tiny"])
    annotate_modules_for_dynamo(model, (), use_orig_params=True)
    assert audit(model).managed
    remove_marks(model)
    assert not audit(model).managed


def gradients(comm: Any) -> dict[str, Any]:
    """The furthest that a gradient of each way is from that of the model that nobody has sharded."""
    sizes = MODELS["tiny"]
    model, batch = make_model(sizes), sizes.batch(0)
    model(batch).square().mean().backward()
    setting = Setting(sizes, batch, "aot_eager", init_device_mesh("cpu", (2,)))
    furthest, graphs = {}, {}
    for way, shard in WAYS.items():
        torch.compiler.reset()
        sharded = shard(setting)
        for _ in range(2):
            sharded.step()
        trained: Any = sharded.model
        differences = [
            float((parameter.grad.full_tensor() - expected.grad).abs().max())
            for parameter, expected in zip(trained.parameters(), model.parameters(), strict=True)
        ]
        furthest[way] = max(differences)
        graphs[way] = (sharded.compilation.graphs, sharded.compilation.guards)
    return {"furthest": furthest, "graphs": graphs}


@pytest.mark.timeout(200)
def test_every_way_gives_the_gradients_of_the_model_and_marks_save_guards() -> None:
    with patience(150.0):
        for case in ProcessWorld(2).run(gradients):
            assert list(case["furthest"]) == list(WAYS)
            assert max(case["furthest"].values()) < 1e-6, case
            counts = case["graphs"]
            assert counts[EAGER] == (0, 0)
            assert counts[ANNOTATED][0] > 0
            assert counts[ANNOTATED][1] < counts["compiled, not annotated"][1], counts
