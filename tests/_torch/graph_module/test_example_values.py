from __future__ import annotations

import torch
from torch import nn
from torch.fx import symbolic_trace

from partita._torch.graph_module.example_values import copy_graph_module, example_tensors, with_example_values


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.norm(x) * x.sum().item()


def test_nodes_get_example_values_and_nothing_is_computed() -> None:
    gm = symbolic_trace(Net())
    before = {name: value.clone() for name, value in gm.state_dict().items()}
    valued = with_example_values(gm, [torch.ones(2, 3)], lambda _node: False)
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items())
    shapes = {node.name: node.meta["val"].shape for node in valued.graph.nodes if node.op == "call_module"}
    assert shapes == {"norm": (2, 3)}
    assert not any("val" in node.meta for node in gm.graph.nodes)


def test_skipped_nodes_and_their_users_have_none() -> None:
    gm = symbolic_trace(lambda x: (x.sin().cos(), x.exp()))
    valued = with_example_values(gm, [torch.ones(2)], lambda node: node.name == "sin")
    assert [node.name for node in valued.graph.nodes if "val" in node.meta] == ["x", "exp"]


def test_grad_mode_is_left_as_it_was() -> None:
    gm = symbolic_trace(lambda x: x.sin())
    with gm.graph.inserting_before(next(iter(gm.graph.find_nodes(op="call_method", target="sin")))):
        gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    with_example_values(gm, [torch.ones(2)], lambda _node: False)
    assert torch.is_grad_enabled()


def test_a_copy_of_a_module_has_the_same_state_and_a_graph_of_its_own() -> None:
    gm = symbolic_trace(Net())
    copy = copy_graph_module(gm)
    assert copy.norm is gm.norm
    assert copy.graph is not gm.graph
    copy.norm = None
    assert gm.norm is not None


def test_example_tensors_lie_on_devices_that_need_not_be_there() -> None:
    here, there = example_tensors((2, 3), ("cpu", "cuda"))
    assert (here.device.type, there.device.type, tuple(there.shape)) == ("cpu", "cuda", (2, 3))
