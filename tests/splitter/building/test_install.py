"""A piece gets what its graph refers to, under the original names."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import symbolic_trace

from partita.splitter.building.install import attributes_of, install, renamed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * self.scale + self.shift + self.scale


def test_parameters_buffers_and_modules_keep_their_names_and_are_not_copied() -> None:
    gm = symbolic_trace(Model())
    attributes = attributes_of(gm, gm.graph.nodes)
    assert [item.target for item in attributes] == ["block.0", "block.1", "scale", "shift"]
    piece = nn.Module()
    install(piece, attributes)
    assert piece.scale is gm.scale
    assert piece.get_submodule("block.1") is gm.get_submodule("block.1")
    assert set(piece.state_dict()) == set(gm.state_dict())  # the buffer is still not persistent


def test_modules_on_the_way_follow_the_mode_of_the_piece() -> None:
    gm = symbolic_trace(Model())
    piece = nn.Module().eval()
    install(piece, attributes_of(gm, gm.graph.find_nodes(op="call_module", target="block.0")))
    assert not piece.get_submodule("block").training
    assert gm.get_submodule("block.0").training


def test_an_attribute_may_have_another_name_in_a_piece() -> None:
    gm = symbolic_trace(Model())
    piece = nn.Module()
    install(
        piece,
        renamed(attributes_of(gm, gm.graph.find_nodes(op="get_attr", target="scale")), {"scale": "own"}),
    )
    assert piece.own is gm.scale
