"""Autocast blocks inside of checkpointed regions under Dynamo."""

from __future__ import annotations

import torch
from tests.traced_regions import need_traced_regions
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from partita._torch.autograd.region_switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from partita._torch.compile.region_nodes import trace_autocast_in_regions


def _region(x: Tensor, weight: Tensor) -> Tensor:
    """As a graph has it; ``with torch.autocast`` is another way through Dynamo."""
    block = ENTER_AUTOCAST("cpu", torch.bfloat16, True, None)
    hidden = x @ weight
    EXIT_AUTOCAST(block)
    return hidden.relu().float() @ weight


def _checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    result = checkpoint(_region, x, weight, use_reentrant=False)
    assert isinstance(result, Tensor)
    return result


def test_a_region_with_autocast_of_its_own_is_compiled() -> None:
    need_traced_regions()
    trace_autocast_in_regions()
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(_checkpointed, backend="aot_eager", fullgraph=True)(x, weight)
    eager = _checkpointed(x, weight)
    assert torch.equal(compiled, eager)
    grads, expected = (torch.autograd.grad(value.sum(), (x, weight)) for value in (compiled, eager))
    assert all(map(torch.equal, grads, expected))
    assert not torch.is_autocast_enabled("cpu")


def test_it_is_done_once() -> None:
    trace_autocast_in_regions()
    from torch._dynamo.output_graph import SubgraphTracer

    before = SubgraphTracer.create_node
    trace_autocast_in_regions()
    assert SubgraphTracer.create_node is before
