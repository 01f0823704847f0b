"""Finding the node from which on a captured graph differs from its model."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from partita._torch.containers.pytree import flatten, tree_map
from partita._torch.fake.shapes import users_place
from partita._torch.tensors.detached_copy import detached_copy
from partita.capture.proving.samples import Sample
from partita.capture.tracing.module_paths import module_calls
from partita.verification import Difference
from partita.verification.observing.copying import copy_module

__all__ = ["differing_node"]


def differing_node(graph: GraphModule, model: nn.Module, sample: Sample, difference: Difference) -> list[str]:
    """Return a line that names the node, its module and the line of the user's code; none if not found.

    For a gradient it is the node that uses the parameter, for a value the last node of the first module whose
    result the graph does not compute.
    """
    try:
        node = _by_gradient(graph, difference) if difference.kind == "gradient" else None
        node = node or _by_value(graph, model, sample)
    except Exception:  # the difference is reported without it
        return []
    if node is None:
        return []
    calls = module_calls(node)
    home = f" of {calls[-1][0]}" if calls and calls[-1][0] else ""
    place = users_place(node)
    return [f"from node {node.name!r}{home} on{f', at {place}' if place else ''}"]


def _by_gradient(graph: GraphModule, difference: Difference) -> Node | None:
    name = difference.where.removeprefix("gradient of ")
    for node in graph.graph.find_nodes(op="get_attr", target=name, sort=True):
        return next(iter(node.users), None)
    return None


def _by_value(graph: GraphModule, model: nn.Module, sample: Sample) -> Node | None:
    inside: dict[tuple[str, int], list[Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.op.startswith("call_"):
            for call in module_calls(node):
                inside[call].append(node)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        run = _Values(copy.deepcopy(graph))
        flat = flatten((sample.args, sample.kwargs))[0]
        run.run(*tree_map(detached_copy, flat), enable_io_processing=False)
        torch.manual_seed(0)
        for call, results in _results(copy_module(model), sample):
            nodes = inside.get(call, [])
            values = [run.values[node.name] for node in nodes if node.name in run.values]
            if nodes and not all(any(_same(value, result) for value in values) for result in results):
                return nodes[-1]
    return None


class _Values(Interpreter):
    """Records the value of every node."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.values[n.name] = result.clone()
        return result


def _results(model: nn.Module, sample: Sample) -> list[tuple[tuple[str, int], list[Tensor]]]:
    """The result of each call of each module, in the order in which they return."""
    results: list[tuple[tuple[str, int], list[Tensor]]] = []
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():

        def record(_module: nn.Module, _args: Any, result: Any, path: str = name) -> None:
            values = [leaf.clone() for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
            results.append(((path, calls[path]), values))
            calls[path] += 1

        module.register_forward_hook(record)
    args, kwargs = tree_map(detached_copy, (sample.args, sample.kwargs))
    model(*args, **kwargs)
    return results


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
