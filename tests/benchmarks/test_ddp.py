"""The benchmarks of data parallel training: their arithmetic, and that they run where they may."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmarks.ddp_models import MODELS, make_model
from benchmarks.ddp_ways import WAYS, Setting, Step
from benchmarks.ddp_worker import warm
from rich.console import Console
from tests.runtime.worlds import ProcessWorld, patience

from benchmarks import ddp_network, ddp_overlap
from partita.ddp import replicate
from partita.errors import ExecutionError, UsageError
from partita.runtime import Comm


def test_rows_are_measured_against_the_longer_of_computing_and_network() -> None:
    """And against what can be reached: 0.25 s forward, and then the longer of 0.75 s and the network."""
    seconds = {
        "alone": [1.0, 1.0],
        "alone in eager mode": [1.25, 1.25],
        "forward": [0.25, 0.25],
        "network": [0.5, 2.0],
        "DDP": [1.5, 3.0],
        "partita_ddp": [0.75, 3.0],
    }
    problems = {"compiled autograd": "refused"}
    found: dict[str, Any] = {
        "relation": 1.0,
        "megabits_per_s": 100.0,
        "seconds": seconds,
        "problems": problems,
    }
    row, refused, other = ddp_overlap._rows("mlp", 2, found)
    assert (row.way, other.way) == ("DDP", "partita_ddp")
    assert row.over_ddp is not None
    assert other.over_ddp is not None
    assert (row.over_ddp.median, other.over_ddp.median) == (1.0, 0.75)
    assert (refused.way, refused.step_s, refused.over_ddp, refused.problem) == (
        *("compiled autograd", None, None, "refused"),
    )
    assert row.eager_s == 1.25
    assert row.over_limit is not None
    assert row.over_reachable is not None
    assert row.over_limit.median == 1.5
    assert row.reachable_s == (1.0 + 2.25) / 2
    assert row.over_reachable.median == (1.5 / 1.0 + 3.0 / 2.25) / 2
    assert row.exposed_s == 1.25
    captions = ddp_overlap._table([row, refused, other]).caption
    assert captions == "compiled autograd: refused"


def test_without_permission_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_args: Any, **_kwargs: Any) -> Any:
        return subprocess.CompletedProcess([], 1, "", "Operation not permitted")

    monkeypatch.setattr(ddp_network.subprocess, "run", refused)
    monkeypatch.setattr(ddp_network.shutil, "which", lambda _name: "/sbin/ip")
    with pytest.raises(UsageError, match=r"Operation not permitted. This benchmark"), ddp_network.hosts(2):
        pass
    monkeypatch.setattr(ddp_network.shutil, "which", lambda _name: None)
    with pytest.raises(UsageError, match="install iproute2"), ddp_network.hosts(2):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_models_take_their_batches(name: str) -> None:
    sizes = MODELS[name]
    batch = sizes.batch(0)[:1]
    assert make_model(sizes)(batch).shape == batch.shape


def test_each_way_of_training_is_compiled_for_itself() -> None:
    """They would share one graph, and DDPOptimizer would not be asked."""
    graphs = []

    def backend(gm: Any, _inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch.compiler.reset()
    sizes = MODELS["tiny"]
    models = [torch.compile(make_model(sizes), backend=backend) for _ in range(2)]
    for model in models * 2:
        model(sizes.batch(0))
    assert len(graphs) == 2


def test_cells_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(model: str, count: int, cells: Any, **_options: Any) -> list[Any]:
        asked.append((model, count, dict(cells)))
        return []

    monkeypatch.setattr(ddp_overlap, "measure", measure)
    quiet = Console(quiet=True)
    ddp_overlap.main(only=["mlp/2/1/DDP", "mlp/2/*/partita_ddp"], console=quiet)
    both = ["DDP", "partita_ddp"]
    assert asked == [("mlp", 2, {"0.3": ["partita_ddp"], "1": both, "2": ["partita_ddp"]})]
    with pytest.raises(UsageError, match=r"'mlp/3/\*' matches no cell; the first of 132 is 'mlp/2/0.3/DDP'"):
        ddp_overlap.main(only=["mlp/3/*"], console=quiet)


def steps_of_every_way(_comm: Comm) -> tuple[list[str], dict[str, str]]:
    """The ways whose steps have the gradients of the model, and why the others have none."""
    sizes = MODELS["tiny"]
    batch, model = sizes.batch(0), make_model(sizes)
    model(batch).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    models: list[Any] = []

    class Watched(Setting):
        def model(self) -> Any:
            models.append(make_model(self.sizes))
            return models[-1]

    def step_of(way: str) -> Step:
        models.clear()
        step = WAYS[way](setting)
        trained = models[0] if models else replica

        def step_and_compare() -> None:
            step()
            for parameter, gradient in zip(trained.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient)

        return step_and_compare

    replica: Any = replicate(make_model(sizes), inner="aot_eager")
    setting = Watched(sizes, batch, "aot_eager", replica)
    steps, problems = warm(list(WAYS), step_of, lambda: None)
    ran = list(steps)
    replica.replication.close()
    return ran, problems


@pytest.mark.dear
def test_every_way_takes_its_steps_with_the_gradients_of_the_model() -> None:
    """Torch refuses its own reducer under compiled autograd, and that reason is kept. In a process
    of its own, which goes on tracing DDP's code after the Python reducer.
    """
    with patience(120.0):
        ((ran, problems),) = ProcessWorld(1).run(steps_of_every_way)
    assert list(problems) == ["compiled autograd"]
    assert 'use torch._dynamo.config.optimize_ddp="python_reducer"' in problems["compiled autograd"]
    assert [*ran, *problems] == sorted(WAYS, key=lambda way: way in problems)


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the command ip (package iproute2)")
def test_a_rank_that_fails_is_named_with_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def namespaces(count: int) -> Iterator[list[str]]:
        yield [f"partita-missing-{number}" for number in range(count)]

    monkeypatch.setattr(ddp_overlap, "hosts", namespaces)
    with pytest.raises(
        ExecutionError, match=r"did not come to its end(.|\n)*rank 1 ended with \d+ and wrote"
    ):
        ddp_overlap.main(quick=True, console=Console(quiet=True))
