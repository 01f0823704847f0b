"""A captured graph into its stages, once it is decided which node belongs to which."""

from __future__ import annotations

from torch import Tensor
from torch.fx import GraphModule

from partita.errors import InfeasiblePlan
from partita.graph.effects import analyse
from partita.pipelining.frontends.graph.branches import repeat_branches
from partita.pipelining.frontends.graph.levels import check_levels
from partita.pipelining.frontends.graph.multi_use import (
    MultiUseParameterConfig,
    MultiUseParamSpec,
    transmit_parameters,
)
from partita.pipelining.frontends.graph.repeated_conversions import repeat_conversions
from partita.pipelining.frontends.graph.repeated_masks import repeat_masks
from partita.pipelining.frontends.graph.writes import check_writes, written_inputs
from partita.pipelining.interface.layout import copied
from partita.runtime import key_random_nodes
from partita.splitter import Split, split

__all__ = ["copied_for_a_stage", "cut_graph", "key_random_calls"]


def cut_graph(
    whole: GraphModule,
    assignment: dict[str, int],
    spec: MultiUseParamSpec = MultiUseParameterConfig.REPLICATE,
) -> Split:
    """Repeat in each stage what it works out itself, key the random calls of a graph, both in place, and
    return the graph's stages.

    Args:
        assignment: the stage of each node that computes; it gets the nodes that are added.
        spec: what happens to parameters that several stages use.

    Raises:
        CaptureError: a cut goes through something that must lie in one stage.
        InfeasiblePlan: a stage has nothing to compute.
    """
    repeat_branches(whole, assignment)
    repeat_masks(whole, assignment)
    repeat_conversions(whole, assignment)
    transmit_parameters(whole, assignment, spec)
    check_levels(whole, assignment)
    check_writes(whole, assignment)
    key_random_calls(whole)
    for node in whole.graph.nodes:
        if node.name not in assignment and node.op.startswith("call_"):
            # a seeding node goes with the random node behind it
            assignment[node.name] = assignment[node.next.name]
    stages = max(assignment.values()) + 1
    cut = split(whole, {name: f"pp_{stage}" for name, stage in assignment.items()})
    if [piece.key for piece in cut.pieces] != [f"pp_{stage}" for stage in range(stages)]:
        raise InfeasiblePlan(
            f"the cuts ask for {stages} stages, but {len(cut.pieces)} have anything to compute: some hold "
            "nothing but switches of a grad or autocast region; move the cut"
        )
    _copy_what_is_written(cut)
    return cut


def _copy_what_is_written(cut: Split) -> None:
    """Let the stitched graph hand each stage copies of what it writes to, as a stage on a rank of its own has
    (`ValueStage`): a write that other stages should see, and would not see there, is not seen here either.
    """
    graph = cut.module.graph
    for piece in cut.pieces[1:]:  # the first is given the caller's own arguments
        written = written_inputs(piece.module)
        for call in graph.find_nodes(op="call_module", target=piece.name) if written else ():
            with graph.inserting_before(call):
                call.args = tuple(
                    graph.call_function(copied_for_a_stage, (value,)) if name in written else value
                    for name, value in zip(piece.inputs, call.args, strict=True)
                )
            cut.module.recompile()


def copied_for_a_stage(value: Tensor | None) -> Tensor | None:
    """A copy of what is sent; None is that of a branch that is not taken."""
    return None if value is None else copied(value)


def key_random_calls(whole: GraphModule) -> None:
    """Seed each random call of a graph by the number of its site, in place (see ``runtime.rng``)."""
    effects = analyse(whole)
    random = {effects.nodes[position] for position in effects.random}
    key_random_nodes(whole, random.__contains__)
