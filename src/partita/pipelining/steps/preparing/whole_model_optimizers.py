"""The check that no optimizer of a rank works out a number of all parameters of the model: it has those of
the rank's stages alone, so each rank would train with another number than the uncut model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import LBFGS, Optimizer

from partita.errors import ExecutionError
from partita.pipelining.stages.stage import Stage
from partita.pipelining.tied.stepped_once import before_optimizers_step

__all__ = ["refuse_whole_model_optimizers"]

_BESIDE_AN_ESTIMATE = {"d0", "growth_rate", "k", "step"}
"""Options beside the estimate ``d`` of Prodigy and D-Adaptation; that of Adafactor is a threshold."""


def refuse_whole_model_optimizers(watcher: object, stages: Mapping[int, Stage], count: int) -> None:
    """As long as `watcher` lives, raise ExecutionError where an optimizer that needs all parameters is about
    to step those of these stages.

    Args:
        stages: of this rank, by index.
        count: how many stages the model has.
    """

    def before_step(_: object, optimizer: Optimizer) -> None:
        reason = _number_of_all(optimizer)
        if reason is None:
            return
        stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(not stepped.isdisjoint(stage.module.parameters()) for stage in stages.values()):
            raise ExecutionError(
                f"{type(optimizer).__name__} {reason[0]}, and this rank has those of stages {list(stages)} "
                f"of {count} alone, so its steps would be others than the uncut model's: {reason[1]}"
            )

    if len(stages) < count:
        before_optimizers_step(watcher, before_step)


def _number_of_all(optimizer: Optimizer) -> tuple[str, str] | None:
    """What an optimizer works out of all parameters, and what to do instead; None where there is nothing.

    Other people's are known by their options: ``max_grad_norm`` of LAMB (timm, apex), the estimate ``d`` of
    Prodigy and D-Adaptation, which some sum over ranks, with ``fsdp_in_use``.
    """
    another = "take an optimizer that looks at each parameter alone, such as AdamW, or train the model uncut"
    if isinstance(optimizer, LBFGS):
        return "looks for one direction and one length of the step for all parameters", another
    options: dict[str, Any] = {key: value for group in optimizer.param_groups for key, value in group.items()}
    if options.get("max_grad_norm"):
        norm = options["max_grad_norm"]
        return (
            f"clips by the norm of all gradients (max_grad_norm={norm})",
            f"make it with max_grad_norm=None, and call partita.pipelining.clip_grad_norm_(schedule, {norm}) "
            "before its step",
        )
    if "d" in options and options.keys() & _BESIDE_AN_ESTIMATE and not options.get("fsdp_in_use"):
        return "estimates its learning rate from all parameters", another
    return None
