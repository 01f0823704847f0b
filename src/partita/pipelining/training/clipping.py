"""Clipping of gradients by their norm over all stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from partita._torch.tensors.norms import each_norm
from partita.errors import ExecutionError
from partita.listing import first_few
from partita.pipelining.stages.placing.state_of_stage import stage_modules
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.pipelining.training.needs_schedule import check_schedule
from partita.runtime.one_at_a_time import one_at_a_time
from partita.runtime.publish_errors import publish_errors
from partita.runtime.same_settings import refuse_differences

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

    Bit for bit equal to ``torch.nn.utils.clip_grad_norm_`` over the uncut model's parameters: each rank
    computes the norms of its own gradients, and these are combined in the order of the model. A parameter
    that several stages hold counts once. Equal to about 1e-6 where gradients have several dtypes (torch
    groups them in no fixed order), are sharded (``fully_shard``, tensor parallel layers), or the stages were
    not cut by `pipeline` (they are combined in the order of the stages then).

    Args:
        max_norm: the largest norm that gradients may have afterwards.
        norm_type: of the p-norm; ``float("inf")`` or ``"inf"`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, where the norm is infinite or NaN, before anything changes.
        foreach: one kernel for many tensors; None: wherever torch can.

    Returns:
        The norm before clipping, 0-d, on the device of this rank's stage.

    Raises:
        ExecutionError: the norm is not finite, with ``error_if_nonfinite``; names the parameters.
        SignatureMismatch: the ranks give different arguments.
        ArgumentError: ``schedule`` is something else, such as parameters.
    """
    check_schedule(schedule, "clip_grad_norm_")
    device = next(iter(schedule.stages.values())).device
    what = "clipping gradients"
    with one_at_a_time(schedule.comm, what), publish_errors(schedule.comm, what):
        norm_type = float(norm_type)
        own = _by_mesh(_own_gradients(schedule))
        gathered = [
            (entry.place, entry.name, _full_norm(norm))
            for group in own
            for entry, norm in zip(
                group, each_norm([entry.gradient for entry in group], norm_type, foreach), strict=True
            )
        ]
        settings = {
            "max_norm": repr(float(max_norm)),
            "norm_type": repr(norm_type),
            "error_if_nonfinite": repr(bool(error_if_nonfinite)),
        }
        parts = schedule.comm.all_gather_object((settings, gathered))
    refuse_differences([said for said, _ in parts])  # on every rank alike
    everywhere = {place: (name, norm) for _, part in parts for place, name, norm in part}
    ordered = [everywhere[place] for place in sorted(everywhere)]
    if not ordered:
        return torch.tensor(0.0, device=device)
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for _, norm in ordered]), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise ExecutionError(_message(ordered, total, norm_type))
    for group in own:
        torch.nn.utils.clip_grads_with_norm_([entry.parameter for entry in group], max_norm, total, foreach)
    return total


@dataclass(frozen=True)
class _Entry:
    """A parameter with a gradient. Its ``place`` in the order of the model is that of all its copies."""

    place: tuple[int, int]
    name: str
    parameter: nn.Parameter
    gradient: Tensor


def _own_gradients(schedule: PipelineSchedule) -> Iterator[_Entry]:
    """The parameters of this rank that have a gradient, each once."""
    seen: set[int] = set()
    for index, stage in sorted(schedule.stages.items()):
        order = {name: number for number, name in enumerate(stage.by_mode.parameters)}
        (module,) = stage_modules(stage)
        places: dict[int, list[tuple[int, int]]] = {}
        parameters: dict[int, tuple[str, nn.Parameter]] = {}
        named = [  # under the model's names first, then under those of a wrapper
            item
            for part in (stage.unwrapped, module)
            for item in part.named_parameters(remove_duplicate=False)
        ]
        for number, (name, parameter) in enumerate(named):
            place = (0, order[name]) if name in order else (1 + index, number)
            places.setdefault(id(parameter), []).append(place)
            parameters.setdefault(id(parameter), (name, parameter))
        for identity, (name, parameter) in parameters.items():
            if parameter.grad is not None and identity not in seen:
                yield _Entry(min(places[identity]), name, parameter, parameter.grad)
        seen.update(parameters)


def _by_mesh(entries: Iterable[_Entry]) -> list[list[_Entry]]:
    """Apart by the mesh that a gradient is sharded over, if any: torch computes with those of one mesh at a
    time, as a stage has several of where some of its layers are tensor parallel.
    """
    groups: dict[DeviceMesh | None, list[_Entry]] = {}
    for entry in entries:
        mesh = entry.gradient.device_mesh if isinstance(entry.gradient, DTensor) else None
        groups.setdefault(mesh, []).append(entry)
    return list(groups.values())


def _full_norm(norm: Tensor) -> Tensor:
    """The norm of all shards of a gradient, on the CPU."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu()


def _message(norms: list[tuple[str, Tensor]], total: Tensor, norm_type: float) -> str:
    bad = [name for name, norm in norms if not torch.isfinite(norm)]
    return (
        f"the norm of order {norm_type:g} of the gradients is {total.item()} (not finite: "
        f"{first_few(bad, 4) or 'only their sum'}), so they can't be clipped: look for the overflow there, "
        "or pass error_if_nonfinite=False"
    )
