"""A graph cut into a chain of modules: each takes what the one before it returns, and passes on what later
ones need.

::

    x --> [ a ] --h--> [ b(h) ] --h, x--> ...        a value that skips a stage goes through it
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.fx import Graph, GraphModule, Node

from partita._torch.fx import lazy_module
from partita.errors import CaptureError
from partita.pipelining.cutting.state import add_aliases, add_unused
from partita.splitter.install import attributes_of, install

__all__ = ["chain_of"]


def chain_of(whole: GraphModule, assignment: Mapping[str, int], model: nn.Module) -> list[GraphModule]:
    """One module a stage, with the model's own submodules and parameters under their original names.

    All but the last return a tuple; the last returns what the model returns.

    Args:
        assignment: the stage of each node that computes.
        model: what ``whole`` was traced from.

    Raises:
        CaptureError: a submodule with buffers runs in two stages.
    """
    stages = max(assignment.values()) + 1
    _check_buffers(whole, assignment)
    made = {node: assignment.get(node.name, 0) for node in whole.graph.nodes if node.op != "get_attr"}
    made |= {node: stages - 1 for node in made if node.op == "output"}
    last: dict[Node, int] = {}
    for node, stage in made.items():
        for operand in node.all_input_nodes:
            last[operand] = max(last.get(operand, 0), stage)
    modules = []
    for stage in range(stages):
        graph, environment = Graph(), dict[Node, Node]()
        for node in whole.graph.nodes:
            enters = node.op == "placeholder" if stage == 0 else made.get(node, stage) < stage
            if enters and (stage == 0 or last.get(node, -1) >= stage):
                environment[node] = graph.placeholder(node.name)
        held = []
        for node in whole.graph.nodes:
            used = node.op == "get_attr" and any(made.get(user) == stage for user in node.users)
            mine = node.op not in ("placeholder", "get_attr", "output") and made[node] == stage
            if used or mine or (node.op == "output" and stage == stages - 1):
                held.append(node)
                environment[node] = graph.node_copy(node, environment.__getitem__)
        if stage < stages - 1:
            crossing = [node for node in environment if made.get(node, stages) <= stage < last.get(node, -1)]
            graph.output(tuple(environment[node] for node in crossing))
        modules.append(_module(whole, graph, held, f"submod_pp_{stage}"))
    add_unused(model, modules)
    add_aliases(model, modules)
    return modules


def _module(whole: GraphModule, graph: Graph, held: list[Node], name: str) -> GraphModule:
    module = lazy_module(graph, name, training=whole.training)
    install(module, attributes_of(whole, (node for node in held if node.op in ("get_attr", "call_module"))))
    return module


def _check_buffers(whole: GraphModule, assignment: Mapping[str, int]) -> None:
    """Stages run in processes of their own and share no memory."""
    homes: dict[str, int] = {}
    for node in whole.graph.find_nodes(op="call_module"):
        target, stage = str(node.target), assignment[node.name]
        if homes.setdefault(target, stage) != stage and list(whole.get_submodule(target).buffers()):
            raise CaptureError(
                f"{target!r} has buffers and runs in stages {homes[target]} and {stage}, which can't share "
                "them: cut so that one stage has all of its calls"
            )
