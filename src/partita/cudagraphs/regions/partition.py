"""Cutting a graph into regions: each a submodule, and what stands between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from partita._torch.graph_module.example_values import with_example_values
from partita._torch.graph_module.nodes import append_copy, map_arguments
from partita.cudagraphs.regions.capturable import CaptureRules
from partita.cudagraphs.regions.grouping import RegionPlan, find_regions
from partita.errors import GraphError
from partita.garbage import no_garbage_collection
from partita.graph.effects import analyse
from partita.splitter.building.cut import CutOptions
from partita.splitter.building.install import attributes_of, install
from partita.splitter.decisions.analysis import analyse_split
from partita.splitter.result import Split
from partita.splitter.split import SplitBuilder

__all__ = ["cut_at_regions", "example_values", "partition_cudagraphs"]


@no_garbage_collection()
def partition_cudagraphs(
    gm: GraphModule, inputs: Sequence[Any], *, rules: CaptureRules | None = None
) -> GraphModule:
    """Return the graph with its capturable regions as submodules ``fused_0``, ``fused_1``, ...

    The rest stays as it is.

    Torch's function of that name; but nothing is moved past what it must not pass, what can't be captured is
    not proposed, a 0-d CPU operand is taken by value, and time is linear. Every region is kept, whatever its
    size. ``gm`` is not changed. ``meta["partita_regions"]`` is the `RegionPlan`, which says why a node is not
    captured.

    Args:
        inputs: one value a placeholder, real or fake, for shapes and devices.
        rules: what counts as capturable.

    Raises:
        GraphError: no graph module, or not as many inputs as placeholders.
    """
    if not isinstance(gm, GraphModule):
        raise GraphError(
            f"partition_cudagraphs takes a torch.fx.GraphModule, got {type(gm).__name__}: trace the model "
            f"first"
        )
    with_values = example_values(gm, inputs)
    plan = find_regions(with_values, rules=rules)
    names = {region.key: f"fused_{number}" for number, region in enumerate(plan.regions)}
    cut = cut_at_regions(with_values, plan, names)
    regions = {piece.name for piece in cut.pieces if piece.key in names}
    calls = {str(call.target): call for call in cut.module.graph.find_nodes(op="call_module")}
    for piece in cut.pieces:
        if piece.key not in names:
            _inline(cut.module, calls[piece.name])
    cut.module.meta["partita_regions"] = plan
    cut.module.meta["partition_names"] = regions
    cut.module.graph.lint()
    cut.module.recompile()
    return cut.module


def example_values(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """Return a copy of ``gm`` whose nodes have example values for these inputs.

    It is ``gm`` itself where they have them already.

    Raises:
        GraphError: not as many inputs as placeholders.
    """
    placeholders = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    if len(inputs) != len(placeholders):
        raise GraphError(
            f"the graph has {len(placeholders)} inputs ({', '.join(placeholders)}), got {len(inputs)} "
            "values: give one for each"
        )
    if _fits(gm, inputs):
        return gm
    effects = analyse(gm)
    unsafe = {
        effects.nodes[position].name
        for position, effect in effects.by_position.items()
        if effect.unknown or effect.barrier or (effect.host and effects.nodes[position].target is print)
    }
    return with_example_values(gm, inputs, lambda node: node.name in unsafe)


def _fits(gm: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether every node has an example value, and those of the placeholders are of the same kind as the
    inputs.
    """
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    if not all("val" in node.meta for node in nodes):
        return False
    examples = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    return all(_kind(example) == _kind(value) for example, value in zip(examples, inputs, strict=True))


def _kind(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad


def cut_at_regions(gm: GraphModule, plan: RegionPlan, names: dict[str, str] | None = None) -> Split:
    """Return the graph of ``plan`` in pieces, one for each region and one between two.

    Args:
        names: of the pieces by key; a key without one names its piece itself.
    """
    chosen = names or {}
    analysis = analyse_split(gm, lambda node: plan.keys.get(node.name, "switch"), repair=True)
    builder = SplitBuilder(gm, analysis, "replicate", CutOptions())
    taken = {
        str(node.target).partition(".")[0]
        for node in gm.graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    wanted = []
    for key in analysis.keys:
        name = chosen.get(key, key)
        while name in taken:
            name += "_"
        wanted.append(name)
    return builder.build(wanted)


def _inline(gm: GraphModule, call: Node) -> None:
    """Put the nodes of a piece in place of its call."""
    name = str(call.target)
    piece = gm.get_submodule(name)
    assert isinstance(piece, GraphModule)
    nodes = list(piece.graph.nodes)
    install(gm, attributes_of(piece, nodes))
    environment: dict[Node, Any] = {}
    arguments = iter(call.args)
    result: Any = None
    with gm.graph.inserting_before(call):
        for node in nodes:
            if node.op == "placeholder":
                environment[node] = next(arguments)
            elif node.op == "output":
                result = map_arguments(node.args[0], environment.__getitem__)
            else:
                args = map_arguments(node.args, environment.__getitem__)
                kwargs = map_arguments(node.kwargs, environment.__getitem__)
                environment[node] = append_copy(gm.graph, node, args, kwargs)
    if isinstance(result, Node):
        call.replace_all_uses_with(result)
    else:
        for user in list(call.users):
            user.replace_all_uses_with(result[int(str(user.args[1]))])
            gm.graph.erase_node(user)
    gm.graph.erase_node(call)
    gm.delete_submodule(name)
