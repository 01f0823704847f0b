"""The cost of every node, measured or estimated: seconds forward, seconds backward, bytes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Interpreter, Node

from partita._torch.operators.roofline import roofline_seconds
from partita.graph.effects import analyse

__all__ = ["BYTES_PER_S", "FLOPS_PER_S", "NodeCost", "estimate", "measure"]

FLOPS_PER_S = 100e12
"""Floating-point operations per second of the device that `estimate` counts with."""

BYTES_PER_S = 1e12
"""Bytes per second that it reads and writes."""

Meter = Callable[[Callable[[], Any]], tuple[Any, float]]
"""Calls a function; returns its result and the seconds that it took."""


@dataclass(frozen=True, slots=True)
class NodeCost:
    """What one node costs on this machine, for the inputs that it was measured with.

    Attributes:
        name: of the node.
        forward_s: seconds, the fastest of the repeats.
        backward_s: seconds for the gradients of all its inputs that need one; 0.0 where none does.
        output_bytes: size of the tensors that it returns.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: int


def measure(
    gm: GraphModule, args: Sequence[Any], *, repeats: int = 3, progress: Callable[[float], None] | None = None
) -> list[NodeCost]:
    """Run ``gm`` node by node and measure each node's forward and backward.

    Neither ``gm`` nor ``args`` change: nodes that write run on copies, and the random state is restored.
    Gradients are on, whatever the caller's grad mode.

    Args:
        args: one value for each placeholder.
        repeats: how many runs. A node's time is that of its fastest one: disturbances only add to it.
        progress: called with the share of the work that is done, from 0.0 to 1.0.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        best: dict[str, NodeCost] = {}
        for repeat in range(repeats):
            run = _Timer(gm, _clock)
            run.run(*args, enable_io_processing=False)
            for cost in run.costs:
                earlier = best.get(cost.name, cost)
                best[cost.name] = replace(
                    cost,
                    forward_s=min(earlier.forward_s, cost.forward_s),
                    backward_s=min(earlier.backward_s, cost.backward_s),
                )
            if progress is not None:
                progress((repeat + 1) / repeats)
    return list(best.values())


def estimate(gm: GraphModule, args: Sequence[Any]) -> list[NodeCost]:
    """Estimate the costs of a graph's nodes on the meta device, where nothing can be measured.

    On a device of `FLOPS_PER_S` and `BYTES_PER_S`, each operator takes the longer of its arithmetic and its
    memory traffic. Only the ratios matter to a plan for stages on equal devices.

    Args:
        args: one value for each placeholder, on the meta device.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        run = _Timer(gm, lambda call: roofline_seconds(call, FLOPS_PER_S, BYTES_PER_S))
        run.run(*args, enable_io_processing=False)
    return run.costs


def _clock(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started


class _Timer(Interpreter):
    """Runs each node on detached inputs, so that its backward can be timed alone."""

    def __init__(self, gm: GraphModule, meter: Meter) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.costs: list[NodeCost] = []
        self._meter = meter
        effects = analyse(gm)
        self._writers = {effects.nodes[position] for position in effects.writers}

    def run_node(self, n: Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        leaves: list[torch.Tensor] = []
        args, kwargs = _detached((args, kwargs), leaves, copy=n in self._writers)
        call = self._callable(n, leaves)
        result, forward_s = self._meter(lambda: call(*args, **kwargs))
        outputs = list(_tensors(result))
        size = sum(output.numel() * output.element_size() for output in outputs)
        self.costs.append(NodeCost(n.name, forward_s, self._backward_seconds(outputs, leaves), size))
        return _cut_off(result)

    def _callable(self, n: Node, leaves: list[torch.Tensor]) -> Callable[..., Any]:
        if n.op != "call_module":
            run = getattr(self, n.op)
            return lambda *args, **kwargs: run(n.target, args, kwargs)
        module = self.fetch_attr(str(n.target))
        if n in self._writers:
            module = copy.deepcopy(module)
        leaves += [parameter for parameter in module.parameters() if parameter.requires_grad]
        return cast(Callable[..., Any], module)

    def _backward_seconds(self, outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> float:
        differentiable = [output for output in outputs if output.requires_grad and output.grad_fn is not None]
        if not differentiable or not leaves:
            return 0.0
        gradients = [torch.ones_like(output) for output in differentiable]
        _, backward_s = self._meter(
            lambda: torch.autograd.grad(differentiable, leaves, gradients, allow_unused=True)
        )
        return backward_s


def _detached(value: Any, leaves: list[torch.Tensor], *, copy: bool) -> Any:
    """The same arguments without their history; those that require grad are collected in ``leaves``."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if value.requires_grad:
            tensor.requires_grad_()
            leaves.append(tensor)
        return tensor.clone() if copy else tensor
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [_detached(item, leaves, copy=copy) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _detached(item, leaves, copy=copy) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _cut_off(value: Any) -> Any:
    """The same result without its history; ``requires_grad`` is kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(_cut_off(item) for item in value)
    return value
