"""Programs in the manner of torch's guide to pipelining, run with each of the two packages: nothing but the
name of the package differs.
"""

from __future__ import annotations

import pickle
from importlib import import_module
from inspect import signature
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pipelining.running import assert_equal
from tests.runtime.worlds import endings
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TheirStage
from torch.nn import functional

from partita.runtime import Comm

HAS_MESH = "get_mesh" in signature(TheirStage).parameters  # torch 2.11 has none
PACKAGES = ("torch.distributed.pipelining", "partita.pipelining")
WORDS, WIDTH = 12, 8


class Decoder(nn.Module):
    """Parts may be taken away: what is left runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict(
            {str(n): nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for n in range(2)}
        )
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.output: nn.Module | None = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) if self.embedding is not None else tokens
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h).float() if self.output is not None else h


class Layered(nn.Module):
    """A loop over a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.lm = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm(x)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(WORDS, (8,)), torch.randint(WORDS, (8,))


def _step(schedule: Any, rank: int) -> tuple[list[Tensor], Tensor | None]:
    x, target = _batch()
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(x)
        return [], None
    output = schedule.step(target=target, losses=losses)
    return [loss.detach() for loss in losses], output


def _results(schedule: Any, stage: Any, rank: int) -> Any:
    losses, output = _step(schedule, rank)
    gradients = {name: parameter.grad for name, parameter in stage.submod.named_parameters()}
    return losses, None if output is None else output.detach(), gradients


def manual(package: Any, rank: int) -> Any:
    """Each rank takes away what is not its own."""
    model = Decoder()
    if rank == 0:
        del model.layers["1"]
        model.norm = model.output = None
    else:
        model.embedding = None
        del model.layers["0"]
    stage = package.PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = package.ScheduleGPipe(stage, 4, loss_fn)
    return _results(schedule, stage, rank)


def traced(package: Any, rank: int) -> Any:
    """The model is cut where a split point says."""
    x = torch.LongTensor([1, 2])
    pipe = package.pipeline(
        module=Layered(), mb_args=(x,), split_spec={"layers.1": package.SplitPoint.BEGINNING}
    )
    assert str(pipe)
    assert pipe.num_stages == 2
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    schedule = package.Schedule1F1B(stage, 4, loss_fn=loss_fn)
    return _results(schedule, stage, rank)


def from_module(package: Any, rank: int) -> Any:
    """The module of a stage is taken, and the stage built around it."""
    pipe = package.pipeline(
        Layered(), (torch.LongTensor([1, 2]),), None, {"layers.0": package.SplitPoint.END}
    )
    module = pipe.get_stage_module(rank)
    stage = package.build_stage(module, rank, pipe.info(), torch.device("cpu"))
    home = ".schedules" if package.__name__.startswith("torch") else ""
    kind = import_module(package.__name__ + home).get_schedule_class("gpipe")
    schedule = kind(stage, 4, loss_fn)
    return _results(schedule, stage, rank)


def submodules(package: Any, rank: int) -> Any:
    """A trainer that works out from the class of a schedule how many stages a rank has, sets the module again
    once it is wrapped, and says the order of actions in a file.
    """
    schedules, stages, microbatch = (
        import_module(f"{package.__name__}.{name}") for name in ("schedules", "stage", "microbatch")
    )
    kind = schedules.get_schedule_class("Interleaved1F1B")
    assert issubclass(kind, schedules.PipelineScheduleMulti)
    assert issubclass(kind, schedules._PipelineScheduleRuntime)
    assert issubclass(schedules.get_schedule_class("1f1b"), schedules.PipelineScheduleSingle)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    own = []
    for index in (rank, rank + 2):
        mesh: dict[str, Any] = {"get_mesh": lambda *_: None} if HAS_MESH else {}
        stage = stages.PipelineStage(layers[index], index, 4, torch.device("cpu"), **mesh)
        stage.submod = nn.Sequential(stage.submod)
        own.append(stage)
    with NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("0F0,0F1,2F0,2F1,,2B0,2B1,,0B0,0B1\n,1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n")
        file.flush()
        schedule = schedules._PipelineScheduleRuntime(own, n_microbatches=2, loss_fn=_mean, scale_grads=False)
        schedule._load_csv(file.name)
    x = torch.ones(4, WIDTH)
    losses: list[Tensor] = []
    schedule.step(*([x] if rank == 0 else []), target=x if rank else None, losses=losses if rank else None)
    args, kwargs = microbatch.split_args_kwargs_into_chunks(
        (x, 1), {"y": x.t()}, 2, None, {"y": microbatch.TensorChunkSpec(1)}
    )
    merged = microbatch.merge_chunks([(part[0], 1) for part in args], (microbatch.TensorChunkSpec(0), None))
    return [
        [loss.detach() for loss in losses],
        [parameter.grad for stage in own for parameter in stage.submod.parameters()],
        [list(part) for part in args],
        kwargs,
        list(merged),
    ]


def custom_functions(package: Any, rank: int) -> Any:
    """Functions in the place of what concerns a whole stage, of a schedule that is given as a file; and a
    schedule that only goes forward.
    """
    schedules = import_module(f"{package.__name__}.schedules")
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    own = [package.PipelineStage(layers[index], index, 4, torch.device("cpu")) for index in (rank, rank + 2)]
    schedule = schedules._PipelineScheduleRuntime(own, n_microbatches=2, loss_fn=_mean)
    with NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("0F0,0F1,2F0,2F1,,2B0,2B1,,0B0,0B1\n,1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n")
        file.flush()
        schedule._load_csv(file.name)
    called = []

    def note(action: Any, ctx: Any) -> None:
        assert ctx.schedule_ref is schedule
        losses = ctx.losses if ctx.losses is None else list(ctx.losses)
        arguments = [ctx.arg_mbs, ctx.kwarg_mbs, ctx.target_mbs, losses]
        arguments = [None if part is None else list(part) for part in arguments]
        called.append((str(action), action.stage_index, arguments))

    for kind in (schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD):
        schedule.register_custom_function(kind, note)
    for kind in (schedules.SEND_F, schedules.RECV_B):
        with pytest.raises(ValueError, match=r"custom function|Invalid computation type"):
            schedule.register_custom_function(kind, note)
    x = torch.ones(4, WIDTH)
    schedule.step(*([x] if rank == 0 else []), target=x if rank else None, losses=[] if rank else None)
    forward = package._ScheduleForwardOnly(
        package.PipelineStage(layers[rank], rank, 2, torch.device("cpu")), 2
    )
    with torch.no_grad():
        output = forward.step(*([x] if rank == 0 else []))
    return [
        called,
        output,
        isinstance(forward, schedules._ScheduleForwardOnly),
        issubclass(schedules._ScheduleForwardOnly, schedules.PipelineScheduleSingle),
    ]


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


PROGRAMS = (manual, traced, from_module, submodules, custom_functions)


def _all(comm: Comm) -> bytes:
    torch.set_num_threads(1)
    return pickle.dumps(
        {
            (program.__name__, name): program(import_module(name), comm.rank)
            for program in PROGRAMS
            for name in PACKAGES
        }
    )


@pytest.fixture(scope="module")
def by_rank() -> list[dict[tuple[str, str], Any]]:
    """What two processes found."""
    ends = endings(2, _all)
    assert [ending.error for ending in ends] == [None, None], "\n".join(ending.text for ending in ends)
    return [pickle.loads(ending.result) for ending in ends]


@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_a_program_gives_the_same_with_the_import_changed(by_rank: list[Any], program: str) -> None:
    theirs, ours = ([results[program, name] for results in by_rank] for name in PACKAGES)
    assert_equal(ours, theirs)
    if program in ("submodules", "custom_functions"):
        return
    model = Decoder() if program == "manual" else Layered()
    x, target = _batch()
    loss_fn(model(x), target).backward()
    for _, _, results in ours:
        for name, gradient in results.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize("name", sorted(import_module(PACKAGES[0]).__all__))
def test_every_public_name_of_torchs_package_is_here(name: str) -> None:
    assert hasattr(import_module(PACKAGES[1]), name)


@pytest.mark.parametrize("module", ["schedules", "stage", "microbatch"])
def test_every_public_name_of_torchs_modules_is_here(module: str) -> None:
    there, here = (import_module(f"{package}.{module}") for package in PACKAGES)
    assert [name for name in there.__all__ if not hasattr(here, name)] == []
