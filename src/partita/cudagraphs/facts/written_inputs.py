"""Which inputs a graph writes."""

from __future__ import annotations

from torch.fx import Graph

from partita.errors import GraphError
from partita.graph.effects import Effects, analyse
from partita.graph.order import written_storages

__all__ = ["find_input_mutations", "written_inputs"]


def find_input_mutations(graph: Graph) -> set[int]:
    """Return the indices of the placeholders whose memory the graph writes, through a view or a list too.

    Example values in the metadata (``val`` or ``example_value``) tell which inputs share memory; without
    them, inputs are taken to share none.

    Raises:
        GraphError: the graph belongs to no module, and refers to one.

    >>> import torch
    >>> gm = torch.fx.symbolic_trace(lambda x, y, z: torch.ops.aten._foreach_add_([x, z.view(-1)], 1))
    >>> sorted(find_input_mutations(gm.graph))
    [0, 2]
    """
    owner = graph.owning_module
    if owner is None or owner.graph is not graph:
        if any(node.op in ("get_attr", "call_module") for node in graph.nodes):
            raise GraphError(
                "the graph refers to attributes, but belongs to no module: pass the graph of a GraphModule"
            )
        owner = _BareGraph(graph)  # type: ignore[assignment]
    assert owner is not None
    return set(written_inputs(analyse(owner, distinct_inputs=True)))


def written_inputs(effects: Effects) -> list[int]:
    """Return the indices in order, from the effects of a graph."""
    written = written_storages(effects)
    inputs = [position for position, node in enumerate(effects.nodes) if node.op == "placeholder"]
    return [
        number
        for number, position in enumerate(inputs)
        if written and not written.isdisjoint(effects.storages[position])
    ]


class _BareGraph:
    """A graph without attributes, in the place of a module."""

    def __init__(self, graph: Graph) -> None:
        self.graph: Graph = graph
