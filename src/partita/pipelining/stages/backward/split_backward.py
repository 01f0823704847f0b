"""Cuts one backward pass in two, for any module: I, the gradients of inputs, and W, those of weights.

Of the autograd graph below, I runs the upper row from right to left. At the nodes where a branch leads to
parameters only, it keeps the gradient that arrives. W starts there, and runs the lower row::

    x --- linear --- relu --- linear --- loss
            |                   |
           w1                  w2

Both compute what the whole pass computes, in the order in which it does: the engine always runs the latest
node that can run, so leaving nodes out does not change the order of the others. Each node computes the
gradient of each of its inputs once, in I or in W, and what accumulates into ``.grad``, with all of its hooks,
does so in W.

Some weights' gradients are *early*: computed in I, added to ``.grad`` in W. They are

- of a parameter that several nodes of the upper row use directly (a normalisation that is called twice):
  their shares must be added up in the order of the upper row;
- what a node computes that would cost more if it ran twice: a custom ``autograd.Function``, a graph that the
  user has compiled (one of ``Stage.compile`` has two halves of its own), a region that is checkpointed, a
  kernel that computes all gradients at once (of batch normalisation, recurrent layers, attention); or what
  torch can't compute alone: those of a group normalisation;
- all, where hooks were registered in the forward pass: those on activations must run once.

A reentrant checkpoint hides its parameters from the graph. There, all is done in I, and W has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from partita._torch.autograd.compiled_node import ask, second_half
from partita._torch.autograd.engine import (
    free_saved,
    hooks_paused,
    leaf_of,
    run_backward,
    run_nodes,
)
from partita.pipelining.stages.backward.arrivals import Arrivals
from partita.pipelining.stages.backward.autograd_cut import AutogradCut, AutogradGraph, Catch
from partita.planning.costs.workspaces import WEIGHTS_TOGETHER_BYTES

__all__ = ["InputPass", "WeightPass", "input_pass"]

_Root = tuple[Tensor | GradientEdge, Tensor]


class WeightPass:
    """The backward pass of weights; run once.

    Nodes with large parameters of their own run one by one, so that one gradient is there at a time. The
    others run together, since each run of the engine takes as long as some small kernels.

    Args:
        catches: nodes of the upper row.
        roots: what else W starts from, each with its gradient.
        compiled: nodes of compiled stages, which have a second half of their own.
        outputs: what the whole pass started from. Somebody may keep it, and the graph with it.
    """

    def __init__(
        self,
        catches: Sequence[Catch] = (),
        roots: Sequence[_Root] = (),
        compiled: Sequence[Node] = (),
        outputs: Sequence[ReferenceType[Tensor]] = (),
    ) -> None:
        self._outputs = outputs
        self._catches = catches
        self._roots = roots
        self._compiled = compiled

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._catches or self._roots or self._compiled)

    def run(self) -> None:
        """Add to ``.grad`` of the parameters."""
        together: list[Catch] = []
        size = 0
        for catch in self._catches:
            own = catch.nbytes
            if own > WEIGHTS_TOGETHER_BYTES:
                starts, seeds = catch.starts()
                run_backward(starts, seeds, catch.parameters or (), accumulate=True)
                continue
            if size + own > WEIGHTS_TOGETHER_BYTES:
                # what several nodes lead to is for the last run, which adds up all of its shares
                _accumulate(_gradients([it for it in together if it.parameters is not None]))
                together, size = [it for it in together if it.parameters is None], 0
            together.append(catch)
            size += own
        roots = [*self._roots, *_gradients(together)]
        for node in self._compiled:
            roots += second_half(node)
        _accumulate(roots)
        if any(output() is not None for output in self._outputs):  # else the nodes go with their last run
            for catch in self._catches:
                free_saved(catch.node)
        self._catches, self._roots, self._compiled, self._outputs = (), (), (), ()


def _accumulate(roots: Sequence[_Root]) -> None:
    if roots:
        run_backward([root for root, _ in roots], [seed for _, seed in roots], accumulate=True)


def _gradients(catches: Sequence[Catch]) -> list[_Root]:
    """The gradients of the weights' edges of nodes, and these edges."""
    if torch.is_anomaly_enabled():
        return [root for catch in catches for root in _gradients_in_engine(catch)]
    wanted = [edge for catch in catches for _, edge in catch.edges]
    results = run_nodes([(catch.node, catch.arrived) for catch in catches], wanted) if catches else []
    return [
        (edge, gradient)
        for catch, gradients in zip(catches, results, strict=True)
        for position, edge in catch.edges
        if (gradient := gradients[position]) is not None
    ]


def _gradients_in_engine(catch: Catch) -> list[_Root]:
    """The same of one node, with what the engine checks."""
    starts, seeds = catch.starts()
    edges = list(dict.fromkeys(edge for _, edge in catch.edges))
    leaves = [leaf for edge in edges if (leaf := leaf_of(edge.node)) is not None]
    with hooks_paused(leaves):
        gradients = run_backward(starts, seeds, edges, accumulate=False)
    return [(edge, it) for edge, it in zip(edges, gradients, strict=True) if it is not None]


@dataclass(frozen=True, slots=True)
class InputPass:
    """The results of the backward pass of inputs.

    Attributes:
        gradients: of each leaf; None where nothing depends on it.
        shares: the gradients of the ``shared`` parameters.
        weights: what is left for W.
    """

    gradients: Sequence[Tensor | None]
    shares: Sequence[Tensor | None]
    weights: WeightPass


def input_pass(
    roots: Sequence[Tensor],
    seeds: Sequence[Tensor],
    leaves: Sequence[Tensor],
    shared: Sequence[Tensor] = (),
    *,
    hooked: bool = False,
) -> InputPass:
    """Run the backward pass of inputs.

    Args:
        roots: what the pass starts from; each requires a gradient.
        seeds: their gradients.
        leaves: tensors without history whose gradients are wanted now.
        shared: parameters whose gradients are wanted now too: returned, not left in ``.grad``, and not shown
            to the parameters' hooks.
        hooked: whether hooks were registered during the forward pass.
    """
    if not leaves and not shared:
        return InputPass((), (), WeightPass(roots=[*zip(map(get_gradient_edge, roots), seeds, strict=True)]))
    graph = AutogradGraph.of(roots)
    if graph.accumulates_inside:
        return _whole_pass(roots, seeds, leaves, shared)
    # I: what the leaves depend on, and the weights whose gradients are early
    cut = AutogradCut(graph, [*leaves, *shared], hooked=hooked)
    catches = [cut.catch(node) for node in cut.frontier]
    if catches:  # else the graph goes with I
        cut.free_when_run()
    for node, edges in cut.compiled.items():
        ask(node, edges)
    sooner = cut.early
    computed: Sequence[Tensor | None] = (None,) * (len(leaves) + len(shared) + len(sooner))
    now = [number for number, start in enumerate(graph.starts) if cut.leads[start]]
    if now:
        with hooks_paused([*shared, *sooner]):
            computed = run_backward(
                [roots[number] for number in now],
                [seeds[number] for number in now],
                [*leaves, *shared, *sooner, *(edge for catch in catches for edge in catch.arrivals)],
                accumulate=False,
                keep_graph=bool(catches),
            )
    remaining = iter(computed)
    gradients, shares = list(islice(remaining, len(leaves))), list(islice(remaining, len(shared)))
    early = list(islice(remaining, len(sooner)))
    for catch in catches:
        catch.arrived = tuple(islice(remaining, len(catch.arrivals)))
    # W: roots that lead to weights alone, weights whose gradients are there already, and the caught nodes
    later: list[_Root] = [
        (get_gradient_edge(root), seed)
        for root, seed, start in zip(roots, seeds, graph.starts, strict=True)
        if not cut.leads[start]
    ]
    later += [(weight, it) for weight, it in zip(sooner, early, strict=True) if it is not None]
    reached = [catch for catch in catches if catch.is_reached and catch.parameters != []]
    outputs = tuple(map(ref, roots))
    return InputPass(gradients, shares, WeightPass(reached, later, tuple(cut.compiled), outputs))


def _whole_pass(
    roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], shared: Sequence[Tensor]
) -> InputPass:
    arrivals = Arrivals(leaves)
    before = [parameter.grad for parameter in shared]
    for parameter in shared:
        parameter.grad = None
    try:
        with hooks_paused(shared):
            torch.autograd.backward(roots, seeds)
        shares = [parameter.grad for parameter in shared]
    finally:
        for parameter, gradient in zip(shared, before, strict=True):
            parameter.grad = gradient
    return InputPass(arrivals.gradients(), shares, WeightPass())
