"""Which nodes of an autograd graph lead to inputs, which to parameters only, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from partita._torch.autograd.compiled_node import in_halves
from partita._torch.autograd.engine import (
    accumulates_inside,
    free_when_run,
    gradient_nbytes,
    inputs_of,
    is_large,
    is_opaque,
    leaf_of,
    sequence_number,
)

__all__ = ["AutogradCut", "AutogradGraph", "Catch"]

_Nexts = tuple[tuple[Node | None, int], ...]
_ROOTS, _SEVERAL = object(), object()


@dataclass(frozen=True)
class AutogradGraph:
    """The nodes below some tensors.

    Attributes:
        starts: the node of each tensor.
        order: every node, with the nodes that it passes gradients to, after all of those.
        leaves: the tensor of each node that accumulates into a ``.grad``.
        accumulates_inside: whether a node does so on its own account.
    """

    starts: tuple[Node, ...]
    order: list[tuple[Node, _Nexts]]
    leaves: dict[Node, Tensor]
    accumulates_inside: bool

    @classmethod
    def of(cls, roots: Sequence[Tensor]) -> AutogradGraph:
        """The graph of ``roots``, all of which require a gradient."""
        starts = tuple(root.grad_fn or get_gradient_edge(root).node for root in roots)
        order: list[tuple[Node, _Nexts]] = []
        leaves: dict[Node, Tensor] = {}
        seen = set()
        inside = False
        for start in starts:
            if start in seen:
                continue
            seen.add(start)
            nexts = start.next_functions
            stack = [(start, nexts, iter(nexts))]
            while stack:
                node, nexts, rest = stack[-1]
                for child, _ in rest:
                    if child is not None and child not in seen:
                        seen.add(child)
                        below = child.next_functions
                        stack.append((child, below, iter(below)))
                        break
                else:
                    stack.pop()
                    order.append((node, nexts))
                    if not nexts:
                        leaf = leaf_of(node)
                        if leaf is not None:
                            leaves[node] = leaf
                    elif accumulates_inside(node):
                        inside = True
        return cls(starts, order, leaves, inside)


class AutogradCut:
    """Which nodes run in I, the backward pass of inputs, and which in W, that of weights.

    Args:
        graph: the whole autograd graph.
        wanted: the leaves whose gradients I computes.
        hooked: let I compute the gradients of all parameters (see ``split_backward``).

    Attributes:
        leads: whether I runs a node (or, of a leaf, computes its gradient).
        early: the parameters, besides those wanted, whose gradients I computes.
        frontier: the nodes that I runs and from which W starts.
        private: of those on the frontier, the ones that lead to parameters of their own, and to which.
        compiled: the nodes of compiled stages that I runs and from which W starts, with the numbers of the
            edges that I needs: they compute the gradients for the others in W.
    """

    def __init__(self, graph: AutogradGraph, wanted: Sequence[Tensor], *, hooked: bool = False) -> None:
        self._graph = graph
        ids = {id(leaf) for leaf in wanted}
        self._wanted = {node for node, leaf in graph.leaves.items() if id(leaf) in ids}
        self._early: dict[Node, None] = {}
        if hooked:
            self._early = dict.fromkeys(node for node in graph.leaves if node not in self._wanted)
        self._find_leads()
        while bad := self._unfit():
            self._early.update(dict.fromkeys(self._leaves_below(bad)))
            self._find_leads()
        self.early = [graph.leaves[node] for node in self._early]
        self.compiled = {node: self._edges_of(node) for node in self._weight_children if in_halves(node)}
        self.frontier = [node for node in self._weight_children if node not in self.compiled]
        self.private = self._find_private()

    def free_when_run(self) -> None:
        """Let I free what autograd has saved for it, as it goes, but for what W needs as well."""
        for node, nexts in self._graph.order:
            if nexts and self.leads[node] and (node not in self._weight_children or node in self.compiled):
                free_when_run(node)

    def _edges_of(self, node: Node) -> frozenset[int]:
        return frozenset(
            number
            for number, (child, _) in enumerate(node.next_functions)
            if child is not None and self.leads[child]
        )

    def catch(self, node: Node) -> Catch:
        """Let I keep the gradients that arrive at a node on the frontier."""
        edges = [
            (position, GradientEdge(child, number))
            for position, (child, number) in enumerate(node.next_functions)
            if child is not None and not self.leads[child]
        ]
        return Catch(node, edges, self.private.get(node))

    def _find_leads(self) -> None:
        order, targets = self._graph.order, self._wanted | self._early.keys()
        # I runs a node from which a wanted or early leaf can be reached
        leads: dict[Node, bool] = {}
        for node, nexts in order:
            reaches_target = node in targets
            for child, _ in nexts:
                if child is not None and leads[child]:
                    reaches_target = True
                    break
            leads[node] = reaches_target
        self.leads = leads
        # W runs the others, each reached from one source (a node of I, or the roots) or from several
        source: dict[Node, object] = {start: _ROOTS for start in self._graph.starts if not leads[start]}
        self._source = source
        self._weight_children: dict[Node, list[Node]] = {}
        self._merges = False
        for node, nexts in reversed(order):
            if not nexts:
                continue
            inner = leads[node]
            weight_children = [child for child, _ in nexts if child is not None and not leads[child]]
            if not weight_children:
                continue
            origin = node if inner else source[node]
            for child in weight_children:
                first_origin = source.setdefault(child, origin)
                if first_origin is not origin:
                    source[child] = _SEVERAL
                    self._merges = True
            if inner:
                self._weight_children[node] = weight_children

    def _unfit(self) -> list[Node]:
        """Nodes that W can't run, or that would cost more there."""
        bad = []
        for node, weight_children in self._weight_children.items():
            if is_opaque(node) and not in_halves(node):
                bad += weight_children
            elif self._merges:
                bad += [child for child in weight_children if self._source[child] is _SEVERAL]
        return bad or (self._unordered() if self._merges else [])

    def _unordered(self) -> list[Node]:
        """Nodes that add up three or more gradients (the order of two does not matter), where W may do so in
        another order because some node was made after one that uses its result.
        """
        counts: dict[Node, int] = {}
        for node, nexts in self._graph.order:
            if not self.leads[node]:
                for child, _ in nexts:
                    if child is not None and self._source[child] is _SEVERAL:
                        counts[child] = counts.get(child, 0) + 1
        for start in self._graph.starts:
            if start in counts:
                counts[start] += 1
        large = [node for node, count in counts.items() if count > 2]
        return large if large and not self._is_chronological() else []

    def _is_chronological(self) -> bool:
        return all(
            child is None or child in self._graph.leaves or sequence_number(node) > sequence_number(child)
            for node, nexts in self._graph.order
            for child, _ in nexts
        )

    def _leaves_below(self, nodes: Sequence[Node]) -> list[Node]:
        below = set(nodes)
        leaves = []
        for node, nexts in reversed(self._graph.order):
            if node in below:
                below.update(child for child, _ in nexts if child)
                if node in self._graph.leaves:
                    leaves.append(node)
        return leaves

    def _find_private(self) -> dict[Node, list[Tensor]]:
        private: dict[object, list[Tensor]] = {node: [] for node in self._weight_children}
        for node, leaf in self._graph.leaves.items():
            if not self.leads[node]:
                of_source = private.get(self._source[node])
                if of_source is not None:
                    of_source.append(leaf)
        if self._merges:
            for node, nexts in self._graph.order:
                shared = [
                    child for child, _ in nexts if child is not None and self._source.get(child) is _SEVERAL
                ]
                if shared and not self.leads[node]:
                    private.pop(self._source[node], None)
        return cast(dict[Node, list[Tensor]], private)


class Catch:
    """A node of I at which W starts, with the gradients that arrive there.

    Args:
        node: on the frontier.
        edges: those that lead to what W runs, each with its position among the node's.
        parameters: those that they lead to, where no other node does; else None.

    Attributes:
        arrivals: the edges to the node, whose gradients I is asked for.
        arrived: these gradients; None where there is none.
    """

    __slots__ = ("arrivals", "arrived", "edges", "node", "parameters")

    def __init__(
        self,
        node: Node,
        edges: Sequence[tuple[int, GradientEdge]] = (),
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        self.node = node
        self.edges = edges
        self.parameters = parameters
        self.arrivals = [GradientEdge(node, number) for number in range(inputs_of(node))]
        self.arrived: tuple[Tensor | None, ...] = ()

    @property
    def is_reached(self) -> bool:
        """Whether any gradient has arrived."""
        return any(gradient is not None for gradient in self.arrived)

    @property
    def nbytes(self) -> int:
        """How large the gradients are that it leads to, on the way (of what is expanded) or in the end; 0
        where other nodes lead there too.
        """
        if self.parameters is None:
            return 0
        own = sum(parameter.nbytes for parameter in self.parameters)
        if not is_large(self.arrived):
            return own
        return max(own, sum(gradient_nbytes(edge) for _, edge in self.edges))

    def starts(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """The edges that W starts from, and the gradient of each; empty where none arrived."""
        pairs = zip(self.arrivals, self.arrived, strict=True)
        starts = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        return [edge for edge, _ in starts], [gradient for _, gradient in starts]
