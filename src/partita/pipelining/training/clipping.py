"""Clipping by the norm over all stages, as if the model had never been cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partita._torch.tensors.norms import each_norm
from partita.errors import ExecutionError
from partita.listing import first_few
from partita.pipelining.stages.state_of_stage import stage_modules
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.runtime.publish_errors import publish_errors

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    schedule: PipelineSchedule,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of all stages, in place, so that their norm as one vector is at most ``max_norm``.
    Collective over the pipeline.

    Equal, bit for bit, to ``torch.nn.utils.clip_grad_norm_`` over the uncut model's parameters: each rank
    computes the norms of its own gradients, and all put them together in the order of the model. A parameter
    that several stages hold counts once. Not bit for bit, but to about 1e-6: where gradients have several
    dtypes (torch itself groups them in no fixed order), are sharded (``fully_shard``), or the stages were not
    cut by `pipeline` (the order of stages stands in for the model's).

    Args:
        max_norm: the largest norm that is left.
        norm_type: of the p-norm; ``float("inf")`` or ``"inf"`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, where the norm is infinite or NaN, before anything changes.
        foreach: one kernel for many tensors; None: wherever torch can.

    Returns:
        The norm before clipping, 0-d, on the device of this rank's stage.

    Raises:
        ExecutionError: a norm that is not finite, where that is asked for; names the parameters.
    """
    device = next(iter(schedule.stages.values())).device
    with publish_errors(schedule.comm, "clipping gradients"):
        norm_type = float(norm_type)
        own = list(_own(schedule))
        norms = each_norm([_gradient(entry.parameter) for entry in own], norm_type, foreach)
        said = [(entry.place, entry.name, _whole(norm)) for entry, norm in zip(own, norms, strict=True)]
        everywhere = {
            place: (name, norm)
            for part in schedule.comm.all_gather_object(said)
            for place, name, norm in part
        }
    ordered = [everywhere[place] for place in sorted(everywhere)]
    if not ordered:
        return torch.tensor(0.0, device=device)
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for _, norm in ordered]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise ExecutionError(_message(ordered, total, norm_type))
    torch.nn.utils.clip_grads_with_norm_([entry.parameter for entry in own], max_norm, total, foreach)
    return total


@dataclass(frozen=True)
class _Entry:
    """A parameter that has a gradient. ``place``: equal for copies of one parameter, ascending in the order
    of the model.
    """

    place: tuple[int, int]
    name: str
    parameter: nn.Parameter


def _own(schedule: PipelineSchedule) -> Iterator[_Entry]:
    """This rank's, each object once."""
    seen: set[int] = set()
    for index, stage in sorted(schedule.stages.items()):
        order = {name: number for number, name in enumerate(stage.by_mode.parameters)}
        (module,) = stage_modules(stage)
        places: dict[int, list[tuple[int, int]]] = {}
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for number, (name, parameter) in enumerate(module.named_parameters(remove_duplicate=False)):
            place = (0, order[name]) if name in order else (1 + index, number)
            places.setdefault(id(parameter), []).append(place)
            found.setdefault(id(parameter), (name, parameter))
        for identity, (name, parameter) in found.items():
            if parameter.grad is not None and identity not in seen:
                yield _Entry(min(places[identity]), name, parameter)
        seen.update(found)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _whole(norm: Tensor) -> Tensor:
    """As it travels: on the CPU; of a sharded gradient, that of all shards."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu()


def _message(norms: list[tuple[str, Tensor]], total: Tensor, norm_type: float) -> str:
    bad = [name for name, norm in norms if not torch.isfinite(norm)]
    return (
        f"the norm of order {norm_type:g} of the gradients is {total.item()} (not finite: "
        f"{first_few(bad, 4) or 'only their sum'}), so they can't be clipped: look for the overflow there, "
        "or pass error_if_nonfinite=False"
    )
