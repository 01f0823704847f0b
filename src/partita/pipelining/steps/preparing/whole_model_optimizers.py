"""The check that no optimizer of a rank works out a number of all parameters of the model: it has those of
the rank's stages alone, so each rank would train with another number than the uncut model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import LBFGS, Optimizer

from partita.errors import ExecutionError
from partita.pipelining.stages.optimizer_steps import (
    before_optimizers_step,
    optimizers_calling,
    steps_any_of,
)
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.preparing.optimizer_trial import looks_at_others
from partita.runtime import Comm
from partita.runtime.one_at_a_time import without_other_ranks

__all__ = ["refuse_whole_model_optimizers"]

_BESIDE_AN_ESTIMATE = {"d0", "growth_rate", "k", "step"}
"""Options beside the estimate ``d`` of Prodigy and D-Adaptation; that of Adafactor is a threshold."""


_ANOTHER = "take an optimizer that looks at each parameter alone, such as AdamW, or train the model uncut"


_OTHERS = (
    "steps a parameter by what other parameters and their gradients are, as it did on small tensors",
    _ANOTHER,
)


def refuse_whole_model_optimizers(
    watcher: object, comm: Comm, stages: Mapping[int, Stage], count: int
) -> None:
    """As long as `watcher` lives, raise ExecutionError where an optimizer that needs all parameters is about
    to step those of these stages.

    Args:
        stages: of this rank, by index.
        count: how many stages the model has.
    """
    tried = WeakSet[Optimizer]()

    def before_step(_: object, stepped: Optimizer) -> None:
        for optimizer in dict.fromkeys((stepped, *optimizers_calling())):
            if reason := reason_against(optimizer):
                raise ExecutionError(
                    f"{type(optimizer).__name__} {reason[0]}, and this rank has those of stages "
                    f"{list(stages)} of {count} alone, so its steps would be others than the uncut model's: "
                    f"{reason[1]}"
                )

    def reason_against(optimizer: Optimizer) -> tuple[str, str] | None:
        reason = _number_of_all(optimizer)
        if reason is None and (optimizer in tried or _is_torchs(optimizer) or torch.compiler.is_compiling()):
            return None
        if not steps_any_of(optimizer, stages.values()):
            return None
        if reason is None:
            with without_other_ranks(comm, "trial of an optimizer") as free:
                if free:
                    tried.add(optimizer)
                    reason = _OTHERS if looks_at_others(optimizer) else None
        return reason

    if len(stages) < count:
        before_optimizers_step(watcher, before_step)


def _is_torchs(optimizer: Optimizer) -> bool:
    """All of torch's look at each parameter alone, but for `LBFGS`."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _number_of_all(optimizer: Optimizer) -> tuple[str, str] | None:
    """What an optimizer works out of all parameters, and what to do instead; None where there is nothing.

    Some of other people's are known by their options: ``max_grad_norm`` of LAMB (timm, apex), the estimate
    ``d`` of Prodigy and D-Adaptation, which some sum over ranks, with ``fsdp_in_use``.
    """
    if isinstance(optimizer, LBFGS):
        return "looks for one direction and one length of the step for all parameters", _ANOTHER
    options: dict[str, Any] = {key: value for group in optimizer.param_groups for key, value in group.items()}
    if options.get("max_grad_norm"):
        norm = options["max_grad_norm"]
        return (
            f"clips by the norm of all gradients (max_grad_norm={norm})",
            f"make it with max_grad_norm=None, and call partita.pipelining.clip_grad_norm_(schedule, {norm}) "
            "before its step",
        )
    if "d" in options and options.keys() & _BESIDE_AN_ESTIMATE and not options.get("fsdp_in_use"):
        return "estimates its learning rate from all parameters", _ANOTHER
    return None
