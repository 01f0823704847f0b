"""What may be done to the parts of a stage: to modules inside the one that runs as a stage."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from partita._torch.distributed.fsdp_marks import is_border
from partita._torch.distributed.gradient_sync import converts_borders
from partita._torch.graph_module.lazy_module import LazyGraphModule
from partita._torch.modules.contents import modules_in, own_hooks
from partita.errors import ExecutionError

__all__ = ["check_no_conversions", "check_no_sharded_parts", "check_parts_are_as_cut"]


def check_parts_are_as_cut(module: nn.Module, stage: int) -> None:
    """Check that nobody waits for the call of a part of a captured stage: its parts hold parameters by the
    model's names, and are never called. ``fully_shard`` waits: it gathers a part's parameters in a hook. So
    does a module that was put in the place of a part.

    Raises:
        ExecutionError: a part has hooks, or was replaced; names it.
    """
    for graph in modules_in(module):
        if not isinstance(graph, LazyGraphModule):
            continue
        for part, path in modules_in(graph).items():
            if not path or isinstance(part, GraphModule):
                continue
            if type(part).forward is not nn.Module.forward:
                _check_unread(graph, path, part, stage)
            elif any(own_hooks(part)):
                raise ExecutionError(
                    f"part {path!r} of stage {stage} has hooks (fully_shard sets some), which would never be "
                    "called, since a captured stage runs as one graph: shard or hook stage.module as a "
                    "whole, or make the stage of a module of your own, with PipelineStage"
                )


def _check_unread(graph: GraphModule, path: str, part: nn.Module, stage: int) -> None:
    """Check that the graph reads nothing of a module that has a ``forward``: it was not there at the cut."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target.startswith(f"{path}."):
            raise ExecutionError(
                f"part {path!r} of stage {stage} was replaced by a {type(part).__name__} after the cut, "
                "which would never be called, since a captured stage runs as one graph: replace it in the "
                "model, before pipeline(), or keep the part and load other weights into it"
            )


def check_no_conversions(module: nn.Module, stage: int) -> None:
    """Check that ``fully_shard`` converts nothing on its way to or from a stage that runs the model's own
    code: with the arguments it would convert all that crosses.

    Raises:
        ExecutionError: its policy does.
    """
    if converts_borders(module):
        raise ExecutionError(
            f"stage {stage} is sharded with a MixedPrecisionPolicy that converts what goes in or comes out, "
            "and what crosses to other stages has dtypes of its own: use torch.autocast around the steps in "
            "place of the policy's param_dtype and output_dtype, or give cast_forward_inputs=False"
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
