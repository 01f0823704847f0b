"""A training step under a schedule, all ranks in this process, compared with the uncut model's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, unflatten
from partita.capture.open_sizes.sizes import Sizes
from partita.capture.proving.samples import samples
from partita.cli.models.user_file import Built
from partita.cli.options.schedule_cases import stages_a_rank
from partita.cli.verifying.verify_checks import VerifyCheck
from partita.errors import MicrobatchError, UsageError, VerificationFailed
from partita.pipelining import UncutReference, get_schedule_class
from partita.pipelining.frontends.graph.pipe import GraphPipe
from partita.pipelining.training import verify_step
from partita.planning import Schedule, get_schedule
from partita.runtime import Comm, InProcessWorld
from partita.verification import Difference
from partita.verification.observing.copying import copy_for_run, copy_module
from partita.verification.observing.subject import subject_of

__all__ = ["compare_step", "example_batch", "step_schedule"]


def step_schedule(name: str, stages: int, microbatches: int) -> Schedule:
    """The order of a step, on as many ranks as the schedule was thought out for.

    Raises:
        UsageError: it does not train, or has another number of stages a rank.
        ScheduleError: it is unknown, or can't serve these numbers.
    """
    if microbatches < 1:
        raise UsageError(f"--microbatches is {microbatches}: give 1 or more, or 0 for no step")
    kind = get_schedule(name)
    if not kind.trains:
        raise UsageError(f"--schedule is {kind.name}, which has no backward pass: give 1F1B, say")
    each = stages_a_rank(kind)
    if stages % each:
        raise UsageError(
            f"--schedule is {kind.name}, with {each} stages a rank, and there are {stages}: give --stages "
            f"{stages + each - stages % each}, or 1F1B, which takes any number"
        )
    return kind(stages, microbatches, stages // each)


def compare_step(pipe: GraphPipe, built: Built, schedule: Schedule) -> VerifyCheck:
    """Make a step of a schedule, all ranks in this process, and compare it with the uncut model: outputs,
    losses, gradients, parameters and buffers.

    The microbatches are samples like the example. The loss is a weighted mean of all that the model returns
    and that has a gradient; where nothing has one, the step is of forward passes.
    """
    model = built.model.train()
    pipe.train()
    count, ranks = schedule.microbatches, schedule.ranks
    name = f"a step of {_count(count, 'microbatch')} under {schedule.name} on {_count(ranks, 'rank')}"
    with redirect_stdout(sys.stderr):
        args, kwargs = example_batch(built, count)
        loss = _probe_loss if _has_gradients(built) else None
        # Made before any rank runs: the stages hold the model's own parameters.
        references = [UncutReference(copy_module(model), count, loss, graph=pipe.whole) for _ in range(ranks)]
        try:
            InProcessWorld(ranks).run(_rank(pipe, schedule, references, loss), args, kwargs)
        except VerificationFailed as error:
            return VerifyCheck(name, False, str(error), (Difference("output", name, str(error)),))
        except MicrobatchError as error:
            raise UsageError(
                f"a step can't be made of such arguments: {error}; or leave the step out: --microbatches 0"
            ) from error
    what = "outputs, losses, gradients, parameters, buffers"
    if loss is None:
        what = "outputs, parameters, buffers; nothing that the model returns has a gradient"
    return VerifyCheck(name, True, f"equal bit for bit\n   compared: {what}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('h') else 's'}"


def _rank(
    pipe: GraphPipe, schedule: Schedule, references: list[UncutReference], loss: Callable[..., Tensor] | None
) -> Callable[..., None]:
    def run(comm: Comm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = [stage for stage, rank in enumerate(schedule.stage_ranks) if rank == comm.rank]
        stages = [pipe.build_stage(stage, comm=comm) for stage in own]
        steps = get_schedule_class(schedule.name)(stages, schedule.microbatches, loss)
        verify_step(steps, references[comm.rank], *args, **kwargs)

    return run


def example_batch(built: Built, microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch whose first microbatch is the example, and the others samples like it.

    Tensors are joined along dim 0. Those with 1 there, where others have more, and what is no tensor or has
    no dimension, stay as they are for all microbatches.
    """
    parts = [(built.args, built.kwargs)]
    parts += [_sample(built, seed) for seed in range(1, microbatches)]
    columns = zip(*(flatten(part)[0] for part in parts), strict=True)
    _, structure = flatten(parts[0])
    rows = [leaf.shape[0] for leaf in flatten(parts[0])[0] if isinstance(leaf, Tensor) and leaf.dim()]
    most = max(rows, default=1)
    leaves = [
        torch.cat(column).detach().requires_grad_(column[0].requires_grad)
        if isinstance(column[0], Tensor) and column[0].dim() and column[0].shape[0] == most
        else column[0]
        for column in columns
    ]
    args, kwargs = unflatten(leaves, structure)
    return args, kwargs


def _sample(built: Built, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Other values of the example's kind: other integers too, where the model takes them."""
    _, sample = islice(samples(built.args, built.kwargs, Sizes(), [], seed), 2)
    if sample.gentle is not None and not _runs(built.model, sample.args, sample.kwargs):
        sample = sample.gentle
    return sample.args, sample.kwargs


def _runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    own = copy_for_run(subject_of(model), args, kwargs)
    with torch.no_grad(), torch.random.fork_rng():
        try:
            own.subject.call(*own.args, **own.kwargs)
        except Exception:  # whatever a model says to arguments that it does not take
            return False
    return True


def _has_gradients(built: Built) -> bool:
    own = copy_for_run(subject_of(built.model), built.args, built.kwargs)
    with torch.enable_grad(), torch.random.fork_rng():
        return bool(_differentiable(own.subject.call(*own.args, **own.kwargs)))


def _differentiable(output: Any) -> list[Tensor]:
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]


def _probe_loss(output: Any, _: object) -> Tensor:
    """One number whose gradient differs from element to element."""
    total = torch.zeros(())
    for leaf in _differentiable(output):
        weights = torch.arange(leaf.numel(), device=leaf.device).cos().reshape(leaf.shape)
        total = total + (leaf.float() * weights).mean()
    return total
