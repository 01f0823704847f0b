"""The check that no optimizer has parameters of the model as it was when it was cut, where a stage trains
others in their places: the stage was moved, sharded or materialised since.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from partita.errors import ExecutionError
from partita.pipelining.stages.optimizer_steps import before_optimizers_step, stepped_by
from partita.pipelining.stages.stage import Stage

__all__ = ["refuse_stale_optimizers"]


def refuse_stale_optimizers(watcher: object, stages: Mapping[int, Stage]) -> None:
    """As long as `watcher` lives, raise ExecutionError where an optimizer is about to step parameters without
    gradients, and one of these stages has the gradients, of other tensors of the same names.

    Args:
        stages: of this rank, by index.
    """

    def before_step(_: object, optimizer: Optimizer) -> None:
        parameters = stepped_by(optimizer)
        idle = {id(parameter) for parameter in parameters if parameter.grad is None}
        if not idle:
            return
        stepped = set(map(id, parameters))
        for stage in stages.values():
            for name, parameter in stage.unwrapped.named_parameters():
                trains = parameter.grad is not None and id(parameter) not in stepped
                if trains and id(stage.original.parameter(name)) in idle:
                    raise ExecutionError(
                        f"the optimizer has {name!r} of the model that was cut, and stage {stage.index} "
                        "trains another tensor in its place, since it was moved, sharded or materialised: "
                        "its weights would stay as they are. Make the optimizer of "
                        "stage.module.parameters(), after that"
                    )

    before_optimizers_step(watcher, before_step)
