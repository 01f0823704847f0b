"""What may be done to the parts of a stage: to modules inside the one that runs as a stage."""

from __future__ import annotations

from torch import nn

from partita._torch.distributed.fsdp_marks import is_border
from partita._torch.graph_module.lazy_module import LazyGraphModule
from partita._torch.modules.contents import own_hooks
from partita.errors import ExecutionError

__all__ = ["check_no_hooks_on_parts", "check_no_sharded_parts"]


def check_no_hooks_on_parts(module: nn.Module, stage: int) -> None:
    """Check that nobody waits for the call of a part of a captured stage: its parts hold parameters by the
    model's names, and are never called. ``fully_shard`` waits: it gathers a part's parameters in a hook.

    Raises:
        ExecutionError: a part has hooks; names it.
    """
    for graph in module.modules():
        if not isinstance(graph, LazyGraphModule):
            continue
        for path, part in graph.named_modules():
            if path and type(part).forward is nn.Module.forward and any(own_hooks(part)):
                raise ExecutionError(
                    f"part {path!r} of stage {stage} has hooks (fully_shard sets some), which would never be "
                    "called, since a captured stage runs as one graph: shard or hook stage.module as a "
                    "whole, or make the stage of a module of your own, with PipelineStage"
                )


def check_no_sharded_parts(module: nn.Module, stage: int) -> None:
    """Check that no part of a stage that runs the model's own code is sharded by itself: weights that a part
    has given away again would be taken for values that a later stage may still read.

    Raises:
        ExecutionError: a part is; names it.
    """
    for path, part in module.named_modules():
        if path and is_border(part):
            raise ExecutionError(
                f"part {path!r} of stage {stage} is sharded by itself, and a stage of the model's own code "
                "can be sharded as a whole only: fully_shard(stage.module) and no part of it, or make the "
                "stage of a module of your own, with PipelineStage"
            )
