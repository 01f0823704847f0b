"""A step that is compared with the uncut model's, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from partita._torch.modules.contents import named_state
from partita.errors import ArgumentError, VerificationFailed
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.pipelining.training.reference import UncutReference
from partita.runtime.publish_errors import publish_errors
from partita.verification.comparing.compare import EXACT, Mismatch, Tolerance, compare_values

__all__ = ["verify_step"]

_SHOWN = 6


def verify_step(
    schedule: PipelineSchedule,
    reference: UncutReference,
    *args: Any,
    target: Any = None,
    losses: list[Tensor] | None = None,
    tolerance: Tolerance = EXACT,
    **kwargs: Any,
) -> Any:
    """Make a step, and compare it with one of the uncut model: outputs, losses, gradients, parameters and
    buffers. Collective; every rank gives the whole batch, and has the whole model. Training continues from
    there, so that its first step may be made with this.

    Args:
        schedule: its ``step`` is called.
        reference: of the eager model, in the stages' state: ``UncutReference(copy.deepcopy(model), ...)``
            with the schedule's number of microbatches, ``loss_fn`` and seed.
        tolerance: how far apart numbers may be; by default they must be equal bit for bit.

    Returns:
        What ``schedule.step`` returns.

    Raises:
        ArgumentError: the schedule has a loss, and the reference none.
        VerificationFailed: on all ranks, if anything differs on one of them.

    >>> import copy
    >>> import torch
    >>> from partita.pipelining import Schedule1F1B, UncutReference, pipeline
    >>> from partita.pipelining.training import verify_step
    >>> from partita.runtime import InProcessWorld
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    >>> pipe = pipeline(model, (torch.randn(1, 2),), stages=2)
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> def train(comm):
    ...     loss_fn = torch.nn.functional.mse_loss
    ...     schedule = Schedule1F1B(copy.deepcopy(pipe).build_stage(comm.rank, comm=comm), 4, loss_fn)
    ...     reference = UncutReference(copy.deepcopy(model), 4, loss_fn, graph=pipe.whole)
    ...     return verify_step(schedule, reference, x, target=y)
    >>> InProcessWorld(2).run(train)[-1].shape
    torch.Size([8, 1])
    """
    step_losses: list[Tensor] = []
    uncut_losses: list[Tensor] = []
    with publish_errors(schedule.comm, "comparing with the uncut model"):
        state = dict(named_state(reference.whole))
        mine = list(_differing(schedule, state, tolerance, gradients=False))
    _agree(schedule, mine, "the stages are not in the state of the uncut model, before any step")
    with publish_errors(schedule.comm, "running the uncut model"):
        uncut = reference.step(*args, target=target, losses=uncut_losses, **kwargs)
        if schedule.loss_fn is not None and not uncut_losses:
            raise ArgumentError(
                "the uncut model was run without a loss, and the schedule has one: give UncutReference the "
                "loss_fn that the schedule was given; of a pipe with a loss_spec one that takes the loss of "
                "the output, such as lambda output, target: output"
            )
    output = schedule.step(*args, target=target, losses=step_losses, **kwargs)
    with publish_errors(schedule.comm, "comparing a step with the uncut model"):
        state = dict(named_state(reference.whole))  # anew: the model may have put others in their place
        mine = list(_differing(schedule, state, tolerance, gradients=True))
        if schedule.routes.stages - 1 in schedule.stages:
            mine += compare_values(output, uncut, "output", tolerance)
            mine += compare_values(step_losses, uncut_losses, "losses", tolerance)
    _agree(schedule, mine, "the step is not that of the uncut model")
    if losses is not None:
        losses[:] = step_losses
    return output


def _agree(schedule: PipelineSchedule, mine: Sequence[Mismatch], headline: str) -> None:
    """Raise an error on all ranks if one has a mismatch."""
    with publish_errors(schedule.comm, "comparing with the uncut model"):
        everywhere = schedule.comm.all_gather_object([f"{one.path}: {one.message}" for one in mine])
    lines = [f"rank {rank}: {line}" for rank, texts in enumerate(everywhere) for line in texts]
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise VerificationFailed("\n  ".join([f"{headline}:", *lines[:_SHOWN], *more]))


def _differing(
    schedule: PipelineSchedule, state: dict[str, Tensor], tolerance: Tolerance, *, gradients: bool
) -> Iterator[Mismatch]:
    """The parameters and buffers of this rank's stages that are not the reference's."""
    for stage in schedule.stages.values():
        for name, tensor in named_state(stage.module):
            if name not in state:
                yield Mismatch(name, "the uncut model has no such parameter or buffer")
                continue
            whole = state[name]
            yield from compare_values(tensor.detach(), whole.detach(), name, tolerance)
            if gradients:
                yield from compare_values(tensor.grad, whole.grad, f"gradient of {name}", tolerance)
