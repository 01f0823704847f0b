from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partita._torch.export.export import export_module
from partita._torch.export.open_sizes import SIZE_OF, open_batch
from partita.capture.open_sizes.sizes import Condition, Size, Sizes
from partita.capture.open_sizes.specialise_sizes import specialise_sizes
from partita.errors import CaptureError


class Model(nn.Module):
    """Reads the size of the batch at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return h.reshape(x.shape[0] * 2, 2) / x.shape[0]


class Squeezes(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).squeeze(0)


def _settled(model: nn.Module, x: Tensor) -> tuple[torch.fx.GraphModule, Sizes]:
    module = export_module(model, (x,), {}, way="eager", dynamic_shapes=open_batch([x]))
    return module, specialise_sizes(module, [x])


def test_metadata_has_the_examples_sizes_and_what_is_open_stands_beside_it() -> None:
    module, sizes = _settled(Model(), torch.randn(3, 4))
    values = {node.name: node.meta["val"] for node in module.graph.nodes if "val" in node.meta}
    assert values["x"].shape == (3, 4)
    assert type(values["x"].shape[0]) is int
    assert sizes.shapes["x"] == (Size("batch"), 4)
    assert sizes.shapes["reshape"] == (Size("2*batch"), 2)
    assert {type(value) for name, value in values.items() if name in sizes.numbers} == {int}
    assert torch.equal(module(torch.ones(6, 4)).sum(), module(torch.ones(6, 4)).sum())


def test_sizes_are_read_right_after_their_tensor_is_made() -> None:
    module, _ = _settled(Model(), torch.randn(3, 4))
    reading = [node for node in module.graph.nodes if node.target is SIZE_OF]
    assert [node.prev.op for node in reading] == ["placeholder"]
    assert not reading[0].meta["nn_module_stack"]


def test_a_graph_that_does_not_hold_for_one_sample_says_so() -> None:
    _, sizes = _settled(Squeezes(), torch.randn(3, 4))
    assert sizes.conditions == (Condition("batch > 1", "'squeeze' has shape [4] and not [1, 4]"),)


def test_an_example_for_which_the_graph_does_not_hold_is_refused() -> None:
    x = torch.randn(1, 4)
    two = torch.randn(2, 4)
    module = export_module(Squeezes(), (two,), {}, way="eager", dynamic_shapes=open_batch([two]))
    with pytest.raises(CaptureError, match=r"'squeeze' has shape \[4\] and not \[1, 4\]"):
        specialise_sizes(module, [x])


def test_a_graph_without_open_sizes_is_left_as_it_is() -> None:
    x = torch.randn(3, 4)
    module = export_module(Model(), (x,), {}, way="eager")
    before = str(module.graph)
    assert specialise_sizes(module, [x]) == Sizes()
    assert str(module.graph) == before
