from __future__ import annotations

import pytest
import torch
from torch import nn

from partita._torch.compile.traced import pretend_device, trace_model


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.linear(x).sum().cpu() * 2
        return self.linear(x).relu() * scale.to(x.device)


def devices(gm: torch.fx.GraphModule) -> set[str]:
    values = [node.meta.get("val") for node in gm.graph.nodes]
    return {str(value.device) for value in values if isinstance(value, torch.Tensor)}


def test_forward_and_backward_are_traced_without_values_or_a_device() -> None:
    found = trace_model(Net().to("meta"), (torch.ones(2, 4, device="meta"),), {}, train=True, compute=False)
    forward, backward = found.graphs
    assert (forward.kind, backward.kind) == ("forward", "backward")
    assert not found.breaks
    assert not found.stopped
    assert devices(forward.gm) == {"meta", "cpu"}  # the copy to the host is in the graph
    assert len(forward.static_inputs) == 2
    assert forward.returned == 1
    assert backward.returned is None
    pretend_device(found.graphs, "meta", torch.device("cuda", 0))
    assert devices(forward.gm) == {"cuda:0", "cpu"}


def test_a_number_that_the_host_reads_stays_in_the_graph_where_nothing_is_computed() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((2,), x.sum().item(), device=x.device)

    found = trace_model(Reads(), (torch.ones(2, device="meta"),), {}, train=False, compute=False)
    assert len(found.graphs) == 1
    assert any("_local_scalar_dense" in node.name for node in found.graphs[0].gm.graph.nodes)


def test_where_a_value_is_needed_and_missing_the_trace_stops_and_says_so() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            return x.cos() if x.sum() > 0 else x

    found = trace_model(Branches(), (torch.ones(2, device="meta"),), {}, train=False, compute=False)
    assert len(found.graphs) == 1
    assert "test_traced.py" in found.stopped
    computed = trace_model(Branches(), (torch.ones(2),), {}, train=False, compute=True)
    assert len(computed.graphs) == 2
    assert not computed.stopped
    assert computed.result is not None


def test_a_break_has_the_line_of_the_user() -> None:
    class Prints(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

    found = trace_model(Prints(), (torch.ones(2),), {}, train=False, compute=True)
    assert len(found.graphs) == 2
    assert "test_traced.py" in found.breaks[0].source
    assert "graph_break()" in found.breaks[0].source


def test_what_the_model_raises_while_it_is_computed_is_raised() -> None:
    with pytest.raises(RuntimeError, match=r"must have same reduction dim|mat1 and mat2"):
        trace_model(nn.Linear(3, 3), (torch.ones(2, 4),), {}, train=False, compute=True)
