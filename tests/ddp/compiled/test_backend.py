"""The backend by itself."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import batch, loss_of, seeded
from tests.group_of_one import group_of_one
from torch import nn
from torch._inductor import compile_fx, config
from torch.fx import Graph, GraphModule

from partita.ddp import replicate
from partita.ddp.compiled.backend import partita_ddp
from partita.ddp.replicas.replication import REPLICATIONS
from partita.errors import ArgumentError, NotCompiled, ReplicasDiffer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"options": {"outer": 1}}, "beside inner, mode and options .*: Unexpected .* option outer; see"),
        (
            {"options": {"max_autotune": "yes"}},
            "that Inductor knows: Unexpected type of attr max_aut",
        ),
        ({"mode": "fast"}, "that Inductor knows: Unrecognized mode=fast"),
        ({"mode": "reduce-overhead"}, "Inductor's CUDA graphs can't be cut .* inner=partita.cudagraphs"),
        ({"options": {"triton.cudagraphs": True}}, "Inductor's CUDA graphs can't be cut"),
        ({"options": {"inner": "aot_eager", "max_autotune": True}}, "'aot_eager': leave out 'max_autotune'"),
        ({"options": {"inner": "aot_eager"}, "mode": "max-autotune"}, "'aot_eager': leave out 'mode'"),
        ({"options": {"inner": "cuda"}}, "inner is 'inductor'"),
    ],
)
def test_unknown_modes_and_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        partita_ddp(GraphModule(nn.Module(), Graph()), [], **options)


def test_inductors_options_hold_for_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    compile_one = compile_fx.compile_fx_inner

    def noted(gm: Any, examples: Any, **options: Any) -> Any:
        seen.append((config.epilogue_fusion, config.max_autotune))
        return compile_one(gm, examples, **options)

    def body(comm: Any) -> None:
        model = seeded(lambda: models.mlp(2))
        module: Any = replicate(copy.deepcopy(model), comm, bucket_cap_mb=0.0005)
        loss_of(model(batch(0, 0))).backward()
        run = torch.compile(module, backend=partita_ddp, options={"epilogue_fusion": False})
        loss_of(run(batch(0, 0))).backward()
        for ours, theirs in zip(module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", noted)
    assert config.epilogue_fusion
    alone(body)
    assert len(seen) > 2
    assert set(seen) == {(False, False)}


def test_a_graph_without_replicated_parameters_is_compiled_as_it_is() -> None:
    model = seeded(models.mlp)
    run = torch.compile(copy.deepcopy(model), backend=partita_ddp, options={"inner": "aot_eager"})
    loss_of(run(batch(0, 0))).backward()
    assert torch.equal(run(batch(0, 0)), model(batch(0, 0)))


class Fading(nn.Module):
    """Computes with a buffer to which it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("share", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.share.mul_(0.5)
        return self.layer(x) * self.share


def test_inductor_does_not_compute_again_from_a_buffer_that_was_written() -> None:
    """Torch's partition saves the buffer, written by then, and writes a second time for the backward pass."""

    def body(comm: Any) -> None:
        model = seeded(Fading)
        module: Any = replicate(copy.deepcopy(model), comm)
        run = torch.compile(module, backend=partita_ddp)
        for one in (model, run):
            one(torch.ones(3, 4)).sum().backward()
        assert torch.equal(module.share, model.share)
        for ours, theirs in zip(module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    alone(body)


def _compiled_and_trained(module: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(module, backend=partita_ddp, options={"inner": "aot_eager"})
    loss_of(compiled(batch(0, 0))).backward()
    return module


def test_a_module_that_nobody_replicated_is_warned_of_where_there_are_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank trained a model of its own, without a word."""
    with group_of_one(), warnings.catch_warnings():
        warnings.simplefilter("error", ReplicasDiffer)
        _compiled_and_trained(seeded(models.mlp))
        torch.compiler.reset()
        monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
        wrapped = nn.parallel.DistributedDataParallel(seeded(models.mlp))
        _compiled_and_trained(wrapped)
        del wrapped
        torch.compiler.reset()
        module = seeded(models.mlp)
        with torch.no_grad():
            torch.compile(module, backend=partita_ddp, options={"inner": "aot_eager"})(batch(0, 0))
        with pytest.warns(
            ReplicasDiffer, match=r"each of the 2 ranks trains .* Call replicate\(module\) before"
        ):
            _compiled_and_trained(module)


# Dynamo itself looks at .grad of what a graph break passes on.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_graphs_without_parameters_go_to_the_compiler_of_the_module() -> None:
    """The loss behind the module was compiled with Inductor, and no longer the same bit for bit."""
    seen: list[list[str]] = []

    def inner(gm: Any, _inputs: Any) -> Any:
        seen.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return gm.forward

    def body(comm: Any) -> None:
        module: Any = replicate(seeded(models.mlp), comm, inner=inner)
        step = torch.compile(lambda x: module(x.sin()).cos().mean(), backend=partita_ddp)
        step(batch(0, 0)).backward()
        flat = [name for names in seen for name in names]
        assert "aten.sin.default" in flat
        assert "aten.cos.default" in flat
        module.replication.close()
        assert REPLICATIONS.last_used() is None

    alone(body)


class Labelled(nn.Module):
    """A model with its loss, which is another number once it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = models.mlp(2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.multilabel_margin_loss(self.layers(x), labels)


def test_a_graph_with_a_margin_loss_runs_as_it_is_and_its_gradients_are_reduced() -> None:
    """Its loss was 1.8 off, without a word."""

    def body(comm: Any) -> None:
        model = seeded(Labelled)
        x = batch(0, 0)
        labels = torch.full_like(model.layers(x), -1, dtype=torch.long)
        labels[:, :2] = torch.tensor([1, 0])
        module: Any = replicate(copy.deepcopy(model), comm, bucket_cap_mb=0.0005, inner="aot_eager")
        run = torch.compile(module, backend=partita_ddp)
        expected = model(x, labels)
        expected.backward()
        with pytest.warns(NotCompiled, match=r"a graph runs uncompiled.*multilabel_margin_loss"):
            loss = run(x, labels)
        loss.backward()
        assert torch.equal(loss, expected)
        for ours, theirs in zip(module.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        run(x, labels).backward()  # compiled once, warned once

    alone(body)
