"""Whatever is changed in a file that partita reads, it is refused with an error of partita's, or read."""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.reporting.fake_report import fake_report
from torch import Tensor, nn

from partita.errors import CheckpointError, PlanError, ReportError
from partita.pipelining import load_checkpoint, save_checkpoint
from partita.pipelining.checkpoints import latest_checkpoint, load_safetensors
from partita.planning import (
    BucketPlan,
    Cluster,
    CostModel,
    Gradient,
    Plan,
    Schedule,
    Simulation,
    Unit,
    get_schedule,
    plan_buckets,
    plan_stages,
    simulate,
)
from partita.reporting import report_from_json, report_to_json

EXAMPLES = os.environ.get("PARTITA_FUZZ_EXAMPLES")
NUMBER = -(-int(EXAMPLES or 150) // 15)
"""Of changes to each of the 15 kinds of file."""

SEED = random.randrange(2**32) if EXAMPLES else 0  # the same in every check; `make fuzz` draws new ones
NOISE = (b"", b"\x00", b"\xff", b"-1", b"1e999", b"null", b"{}", b"[[", b'"', b"99999999999999999999", b"../")


def changed(whole: bytes, draw: random.Random) -> bytes:
    """A bit flipped, bytes cut off, taken out, doubled, exchanged or written over."""
    place = draw.randrange(len(whole))
    length = draw.choice((1, 4, draw.randrange(1, len(whole) + 1)))
    kind = draw.randrange(7)
    if kind <= 1:
        return whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :]
    if kind == 2:
        return whole[:place]
    if kind == 3:
        return whole[:place] + whole[place + length :]
    if kind == 4:
        return whole[:place] + whole[place : place + length] + whole[place:]
    if kind == 5:
        other = draw.randrange(len(whole))
        return whole[:place] + whole[other : other + length] + whole[place + length :]
    return whole[:place] + draw.choice(NOISE) + whole[place + draw.randrange(4) :]


def _run(whole: bytes, check: Callable[[bytes, random.Random], str], name: str) -> None:
    """Check changes of a file; ``check`` says what came of one."""
    draw = random.Random(f"{SEED} {name}")
    outcomes: collections.Counter[str] = collections.Counter()
    for number in range(NUMBER):
        text = changed(whole, draw)
        try:
            outcomes[check(text, draw)] += 1
        except BaseException as error:
            error.add_note(f"change {number} of {name} with seed {SEED}: {text[:2000]!r}")
            raise
    sys.stdout.write(f"\n{name}: {dict(outcomes)}\n")


def _refusal(load: Callable[[], object]) -> CheckpointError | None:
    try:
        load()
    except CheckpointError as error:
        return error
    return None


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*model.parameters(), *moments)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "step1"
    save_checkpoint(path, *_model(1), extra={"step": 1, "table": torch.arange(3)})
    return path


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "partita.json"])
def test_a_checkpoint_loads_as_it_was_saved_or_not_at_all(name: str, ours: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(ours, folder)
    saved = _values(*_model(1))
    whole = (ours / name).read_bytes()

    def check(text: bytes, _draw: random.Random) -> str:
        (folder / name).write_bytes(text)
        model, optimizer = _model(2)
        before = _values(model, optimizer)
        error = _refusal(lambda: load_checkpoint(folder, model, optimizer))
        if error is not None:
            assert str(folder) in str(error), error
            assert all(map(torch.equal, before, _values(model, optimizer)))
            latest = latest_checkpoint(tmp_path)
            assert latest in (None, folder)
            return "refused"
        assert text == whole or name == "partita.json", "a change that nobody saw"
        assert all(map(torch.equal, saved, _values(model, optimizer)))
        return "loaded"

    _run(whole, check, name)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_what_torch_wrote_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """It has no checksums, so other values may come; no other error does, and nothing is half loaded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process.*")
        dcp.save({"model": _model(1)[0].state_dict()}, checkpoint_id=tmp_path)

    def check(text: bytes, _draw: random.Random) -> str:
        (tmp_path / name).write_bytes(text)
        model, _ = _model(2)
        before = [value.detach().clone() for value in model.parameters()]
        error = _refusal(lambda: load_checkpoint(tmp_path, model))
        if error is not None:
            assert str(tmp_path) in str(error), error
            assert all(map(torch.equal, before, model.parameters()))
            return "refused"
        return "loaded"

    _run((tmp_path / name).read_bytes(), check, f"torch's {name}")


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "part.safetensors"])
def test_safetensors_are_read_or_refused(name: str, tmp_path: Path) -> None:
    state = dict(_model(1)[0].state_dict())
    save_file(state, tmp_path / "part.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(state, "part.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    def check(text: bytes, _draw: random.Random) -> str:
        (tmp_path / name).write_bytes(text)
        model, _ = _model(2)
        before = [value.detach().clone() for value in model.parameters()]
        error = _refusal(lambda: load_safetensors(model, tmp_path))
        if error is not None:
            assert str(tmp_path) in str(error), error
            assert all(map(torch.equal, before, model.parameters()))
            return "refused"
        return "loaded"

    _run((tmp_path / name).read_bytes(), check, name)


def _texts() -> dict[str, tuple[str, Callable[[str], object]]]:
    """A text of each kind that is written, and what reads it."""
    units = tuple(Unit(f"unit{number}", forward_s=1.0, backward_s=2.0) for number in range(4))
    costs = CostModel(units, crossing_bytes=(8, 8, 8))
    cluster = Cluster(ranks=2, bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    plan = plan_stages(costs, 2, microbatches=4, cluster=cluster)
    schedule = get_schedule("1F1B")(2, 4)
    gradients = [Gradient(f"weight{number}", 2**20, number * 1e-3) for number in range(4)]
    buckets = plan_buckets(gradients, cluster)
    return {
        "plan": (plan.to_json(), Plan.from_json),
        "costs": (costs.to_json(), CostModel.from_json),
        "cluster": (cluster.to_json(), Cluster.from_json),
        "schedule": (schedule.to_json(), Schedule.from_json),
        "CSV": (schedule.to_csv(), Schedule.from_csv),
        "simulation": (simulate(schedule, plan, cluster).to_json(), Simulation.from_json),
        "buckets": (buckets.to_json(), BucketPlan.from_json),
        "report": (report_to_json(fake_report()), report_from_json),
    }


TEXTS = _texts()


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_read_or_refused(kind: str) -> None:
    whole, read = TEXTS[kind]

    def check(text: bytes, _draw: random.Random) -> str:
        try:
            read(text.decode("utf-8", errors="replace"))
        except (PlanError, ReportError):  # schedules' errors are errors of plans
            return "refused"
        return "read"

    _run(whole.encode(), check, kind)
