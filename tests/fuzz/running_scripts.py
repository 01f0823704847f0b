"""Random training scripts on two processes, each held against the same script over the uncut model: all that
a rank can see is compared bit for bit after every step.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.fuzz.scripts import OPTIMIZERS, Cut, Script, Step
from tests.pipelining.running import assert_equal
from torch import Tensor, nn

from partita.errors import PartitaError
from partita.pipelining import (
    GradScaler,
    Pipe,
    UncutReference,
    clip_grad_norm_,
    get_schedule_class,
    load_checkpoint,
    save_checkpoint,
)
from partita.pipelining.training import LossWeights
from partita.runtime import Comm, MicrobatchPlan

__all__ = ["Outcome", "run_scripts"]


@dataclass(frozen=True)
class Outcome:
    """How a script ended on one rank.

    Attributes:
        refusal: partita's error, where it refused; empty where all was equal to the end.
        difference: what was not as in the uncut model, or what was raised and is no error of partita.
    """

    seed: int
    refusal: str = ""
    difference: str = ""


class _Uncut:
    """The script over the uncut model."""

    is_first = is_last = True

    def __init__(self, script: Script, graph: nn.Module | None) -> None:
        self.module = script.model()
        self.runner = UncutReference(self.module, script.microbatches, script.loss_fn(), graph=graph)
        self.optimizer = OPTIMIZERS[script.optimizer](self.module.parameters())
        self.scaler = torch.amp.GradScaler("cpu", enabled=script.scaled, init_scale=8.0)


class _Cut:
    """The script over the stages of this rank."""

    def __init__(self, script: Script, cut: Cut, pipe: Pipe, comm: Comm) -> None:
        indices = [index for index, rank in enumerate(cut.placement) if rank == comm.rank]
        self.stages = [pipe.build_stage(index, comm=comm) for index in indices]
        self.is_first = 0 in indices
        self.is_last = len(cut.placement) - 1 in indices
        self.module = nn.ModuleList(stage.module for stage in self.stages)
        kind = get_schedule_class(cut.schedule)
        stages: Any = self.stages[0] if len(self.stages) == 1 else self.stages
        self.runner = kind(stages, script.microbatches, script.loss_fn())
        self.parameters = [it for it in self.module.parameters() if it.requires_grad]
        self.optimizer = OPTIMIZERS[script.optimizer](self.parameters) if self.parameters else None
        self.scaler = GradScaler(self.runner, "cpu", enabled=script.scaled, init_scale=8.0)
        self._comm = comm
        self._differences: list[str] = []

    def compare(self, actual: Any, expected: Any, where: str) -> None:
        """Note what is not equal: the other rank goes on, and waits for this one."""
        try:
            assert_equal(actual, expected, where)
        except AssertionError as error:
            self._differences.append(f"rank {self._comm.rank}: {error}")

    def agree(self, where: str) -> None:
        """Raise the first difference of any rank, on both. Collective."""
        first = self._comm.all_gather_object(self._differences[:1])
        assert not any(first), f"{where}: {first}"


def run_scripts(comm: Comm, seeds: Sequence[int], folder: str) -> list[Outcome]:
    """Run them one after the other; to be called on two ranks."""
    torch.set_num_threads(1)
    return [_outcome(comm, Script.drawn(seed), Path(folder) / str(seed)) for seed in seeds]


def _outcome(comm: Comm, script: Script, folder: Path) -> Outcome:
    try:
        _run(comm, script, folder)
    except PartitaError as error:
        return Outcome(script.seed, refusal=f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever goes wrong is this script's outcome, and the next one runs
        return Outcome(script.seed, difference=f"{script}: {''.join(traceback.format_exception(error))}")
    return Outcome(script.seed)


def _run(comm: Comm, script: Script, folder: Path) -> None:
    with _quiet():
        pipes = [script.pipe(cut) for cut in script.cuts]
    uncut = _Uncut(script, getattr(pipes[0], "whole", None))
    number = 0
    side = _Cut(script, script.cuts[0], pipes[0], comm)
    for at, step in enumerate(script.steps):
        where = f"step {at}"
        _train(script, step, uncut, side, number, where)
        number += step.calls
        if step.evaluates:
            _evaluate(script, step, uncut, side, number, where)
        if step.resumes:
            place = folder / str(at)
            save_checkpoint(place, side.stages, side.optimizer)
            other = (at + 1) % 2
            side.agree(where)
            scaler, side = side.scaler, _Cut(script, script.cuts[other], pipes[other], comm)
            side.scaler.load_state_dict(scaler.state_dict())
            load_checkpoint(place, side.stages, side.optimizer)
            _compare(uncut, side, f"{where}, loaded")
        side.agree(where)


def _train(script: Script, step: Step, uncut: _Uncut, side: _Cut, number: int, where: str) -> None:
    for module in (uncut.module, side.module):
        module.train(not step.in_eval_mode)
    for call in range(step.calls):
        seen, expected = _call(script, step, uncut, side, "step", number + call)
        if side.is_last:
            side.compare(seen, expected, f"{where}, call {call}")
    _compare(uncut, side, f"{where}, gradients")
    norms = _step(script, uncut), _step(script, side)
    side.compare(norms[1], norms[0], f"{where}, norm")
    _compare(uncut, side, f"{where}, after the optimizer")
    uncut.module.zero_grad()
    side.module.zero_grad()


def _evaluate(script: Script, step: Step, uncut: _Uncut, side: _Cut, number: int, where: str) -> None:
    for module in (uncut.module, side.module):
        module.eval()
    seen, expected = _call(script, step, uncut, side, "eval", number)
    if side.is_last:
        side.compare(seen, expected, f"{where}, evaluation")
    _compare(uncut, side, f"{where}, evaluated")


def _call(
    script: Script, step: Step, uncut: _Uncut, side: _Cut, method: str, number: int
) -> tuple[tuple[Any, list[Tensor]], tuple[Any, list[Tensor]]]:
    """Outputs and losses of both. The uncut model's losses are scaled by hand, as schedules scale theirs."""
    count = step.samples * script.microbatches + step.further
    tokens, named, target = script.batch(count, number)
    plan = MicrobatchPlan.even(count, script.microbatches)
    shares: Sequence[float] = plan.weights
    trains = method == "step"
    weights: dict[str, Any] = {}
    if step.weighted and trains:
        shares = LossWeights.proportional(range(1, script.microbatches + 1)).values
        weights["loss_weights"] = shares
    keeps = {} if step.keeps_outputs else {"return_outputs": False}
    losses: tuple[list[Tensor], list[Tensor]] = ([], [])
    with script.precision():
        args, keywords = _arguments(script, step, side, (tokens, named, target), plan.sizes)
        seen = getattr(side.runner, method)(*args, losses=losses[0], **keywords, **weights, **keeps)
    if script.scaled and trains:
        uncut.scaler.scale(torch.zeros(()))  # which makes it
        scaled = tuple(share * uncut.scaler.get_scale() for share in shares)
        weights["loss_weights"] = LossWeights(scaled, total=None)
    keywords = named if script.own_loss else named | {"target": target}
    with script.precision():
        expected = getattr(uncut.runner, method)(tokens, losses=losses[1], **keywords, **weights)
    return (seen, losses[0]), (expected if step.keeps_outputs else None, losses[1])


def _arguments(
    script: Script, step: Step, side: _Cut, batch: tuple[Tensor, dict[str, Any], Tensor], sizes: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What this rank gives a schedule of a batch: whole, or in microbatches."""
    tokens, named, target = batch
    wants_target = side.is_last and not script.own_loss
    if not step.by_hand:
        more = {"target": target} if wants_target else {}
        return ((tokens,), named | more) if side.is_first else ((), more)
    options: dict[str, Any] = {}
    if side.is_first:
        options["arg_mbs"] = [(part,) for part in tokens.split(sizes)]
        columns = {name: value.split(sizes) for name, value in named.items()}
        options["kwarg_mbs"] = [
            {name: parts[number] for name, parts in columns.items()} for number in range(len(sizes))
        ]
    if wants_target:
        options["target_mbs"] = list(target.split(sizes))
    return (), options


def _step(script: Script, one: _Uncut | _Cut) -> Tensor | None:
    """The optimizer's step, clipped and unscaled where the script says so; the norm, where it is clipped."""
    norm = None
    if script.scaled:
        one.scaler.unscale_(one.optimizer)
    if script.clip is not None and isinstance(one, _Cut):
        norm = clip_grad_norm_(one.runner, script.clip)
    elif script.clip is not None:
        norm = nn.utils.clip_grad_norm_(one.module.parameters(), script.clip)
    if script.scaled:
        one.scaler.step(one.optimizer)
        one.scaler.update()
    elif one.optimizer is not None:
        one.optimizer.step()
    return norm


def _compare(uncut: _Uncut, side: _Cut, where: str) -> None:
    """Every parameter, gradient and buffer that this rank has."""
    parameters = dict(uncut.module.named_parameters(remove_duplicate=False))
    buffers = dict(uncut.module.named_buffers(remove_duplicate=False))
    for stage in side.stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            what = f"{where}, stage {stage.index}: {name}"
            side.compare(parameter.detach(), parameters[name].detach(), what)
            side.compare(parameter.grad, parameters[name].grad, f"{what}, gradient")
        for name, buffer in stage.module.named_buffers(remove_duplicate=False):
            side.compare(buffer, buffers[name], f"{where}, stage {stage.index}: {name}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of a cut, which these scripts have read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
