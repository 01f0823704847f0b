"""Running a case as a pipeline of ranks in this process, and uncut, and comparing the two bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from tests.pipelining.models import Case
from torch import Tensor, nn
from torch.fx import GraphModule

from partita.capture import Captured, capture
from partita.pipelining import Pipe, Schedule1F1B, UncutReference, keyed_graph, pipeline
from partita.pipelining.frontends import pipeline as frontend
from partita.pipelining.schedules import PipelineSchedule
from partita.runtime import Comm, InProcessWorld

STEPS = 3


@dataclass
class Record:
    """All that can be seen of a run."""

    outputs: list[Any] = field(default_factory=list)
    losses: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def note(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            gradient = parameter.grad
            self.gradients[name] = None if gradient is None else gradient.clone()
            self.state[name] = parameter.detach().clone()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self.state[name] = buffer.clone()


def assert_equal(actual: Any, expected: Any, where: str = "") -> None:
    """Bit for bit, structure, dtype and NaN included."""
    assert type(actual) is type(expected), (where, type(actual), type(expected))
    if isinstance(actual, Tensor):
        assert actual.dtype == expected.dtype, where
        assert actual.shape == expected.shape, where
        assert torch.equal(actual, expected), (where, (actual - expected).abs().max())
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys(), (where, actual.keys() ^ expected.keys())
        for key, value in actual.items():
            assert_equal(value, expected[key], f"{where}[{key!r}]")
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected), where
        for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(left, right, f"{where}[{number}]")
    else:
        assert actual == expected, where


def cut(case: Case, stages: int, samples: int = 2, **options: Any) -> Pipe:
    """The case's model in so many stages, cut for microbatches of ``samples``."""
    try:
        pipe = copy.deepcopy(_cut_once(case, stages, samples, tuple(options.items())))
    except TypeError:  # options that can't be told from others, such as a dict
        pipe = _cut(case, stages, samples, tuple(options.items()))
    torch.manual_seed(0)
    return pipe


def _cut(case: Case, stages: int, samples: int, options: tuple[tuple[str, Any], ...]) -> Pipe:
    args, kwargs, _ = case.data(samples)
    where = {"split_spec": case.split_spec(stages)} if stages > 1 else {"stages": 1}
    with _captures_of(case, samples):
        return pipeline(case.model(), args, kwargs, **where, **dict(options))


_cut_once = lru_cache(maxsize=64)(_cut)  # to trace a model takes longer than most of what tests do with it


@contextmanager
def _captures_of(case: Case, samples: int) -> Iterator[None]:
    """Whatever is made of the case in this block begins with one capture, proven once."""

    anywhere = replace(case, after=())  # wherever it is cut

    def remembered(model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Captured:
        try:
            key = tuple(sorted(({"modes": "both"} | options).items()))
            return copy.deepcopy(_capture_once(anywhere, samples, key))
        except TypeError:  # options that can't be told from others, such as a dict
            return capture(model, args, kwargs, **options)

    with patch.object(frontend, "capture", remembered):
        yield


@lru_cache(maxsize=128)
def _capture_once(case: Case, samples: int, options: tuple[tuple[str, Any], ...]) -> Captured:
    args, kwargs, _ = case.data(samples)
    return capture(case.model(), args, kwargs, **dict(options))


def keyed(case: Case, samples: int = 2) -> GraphModule:
    """The whole model as a graph with a pipeline's random numbers, captured with so many samples."""
    args, kwargs, _ = case.data(samples)
    with _captures_of(case, samples):
        return keyed_graph(case.model(), args, kwargs)


Train = Callable[[Any, Sequence[nn.Module], Case, Record], None]


def train(runner: Any, modules: Sequence[nn.Module], case: Case, record: Record) -> None:
    """A few optimizer steps, an evaluation in each mode, and a step that accumulates onto another."""
    parameters = list({p: None for module in modules for p in module.parameters() if p.requires_grad})
    optimizer = torch.optim.AdamW(parameters, lr=0.05) if parameters else None
    for step in range(STEPS):
        args, kwargs, target = case.data(8, seed=10 + step)
        losses: list[Tensor] = []
        record.outputs.append(runner.step(*args, target=target, losses=losses, **kwargs))
        if step == 1:
            runner.eval(*args, target=target, **kwargs)  # touches no gradient
            runner.step(*args, target=target, **kwargs)  # adds up
        for module in modules:
            record.note(module)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        record.losses.append(losses)
    for module in modules:
        module.eval()
    record.outputs.append(runner.eval(*args, target=target, losses=losses, **kwargs))
    record.losses.append(list(losses))
    for module in modules:
        record.note(module)


@lru_cache(maxsize=64)
def uncut(case: Case, microbatches: int = 4, run: Train = train) -> Record:
    """What the whole model does. Not to be changed: tests share it."""
    whole = keyed(case, 8 // microbatches)
    record = Record()
    run(UncutReference(whole, microbatches, case.loss), [whole], case, record)
    return record


def piped(
    pipe: Pipe,
    case: Case,
    kind: type[PipelineSchedule] = Schedule1F1B,
    microbatches: int = 4,
    placement: Sequence[int] | None = None,
    run: Train = train,
) -> list[Record]:
    """What the pipeline does, by rank. Each rank has a copy of the pipe, as processes have."""
    ranks = tuple(placement) if placement is not None else tuple(range(pipe.num_stages))

    def body(comm: Comm) -> Record:
        own = copy.deepcopy(pipe)
        stages = [own.build_stage(index, comm=comm) for index, rank in enumerate(ranks) if rank == comm.rank]
        record = Record()
        schedule = kind(stages, microbatches, case.loss)
        run(schedule, [stage.module for stage in stages], case, record)
        return record

    return InProcessWorld(max(ranks) + 1).run(body)


def assert_same(records: Sequence[Record], expected: Record) -> None:
    """Every rank's state and gradients are those of the whole; outputs and losses are on one rank, as is the
    rule.
    """
    with_outputs = [record for record in records if any(output is not None for output in record.outputs)]
    assert len(with_outputs) == 1
    assert_equal(with_outputs[0].outputs, expected.outputs, "outputs")
    assert_equal(with_outputs[0].losses, expected.losses, "losses")
    assert set().union(*(record.state for record in records)) == expected.state.keys()
    for record in records:
        assert_equal(record.state, {name: expected.state[name] for name in record.state}, "state")
        assert_equal(record.gradients, {name: expected.gradients[name] for name in record.gradients}, "grad")


def errors_of(size: int, body: Callable[[Comm], Any]) -> list[BaseException | None]:
    """What each rank raises."""
    errors: list[BaseException | None] = [None] * size

    def caught(comm: Comm) -> None:
        try:
            body(comm)
        except Exception as error:
            errors[comm.rank] = error

    with suppress(Exception):
        InProcessWorld(size).run(caught)
    return errors
