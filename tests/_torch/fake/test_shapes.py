from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop

from partita._torch.fake.shapes import UnknownNumber, fake_values
from partita.capture import capture
from partita.errors import CaptureError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.side = (nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.a(self.frozen(x)))
        return self.b(h), self.side(h.detach())


def _values() -> tuple[nn.Module, dict[str, object]]:
    model, x = Model(), torch.randn(3, 2)
    return model, fake_values(capture(model, (x,)).module, [x])


def test_values_have_shape_dtype_and_gradient_flag() -> None:
    _, values = _values()
    flags = {name: value.requires_grad for name, value in values.items() if name.startswith("linear")}
    assert flags == {"linear": False, "linear_1": True, "linear_2": True, "linear_3": True}
    assert values["linear_3"].shape == (3, 2)
    assert values["x"].dtype is torch.float32


def test_no_parameter_buffer_or_counter_changes() -> None:
    model, x = Model(), torch.randn(3, 2)
    module = capture(model, (x,)).module
    before = copy.deepcopy(model.state_dict())
    fake_values(module, [x])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_gradients_are_on_also_where_the_caller_has_them_off() -> None:
    with torch.no_grad():
        _, values = _values()
    assert values["linear_1"].requires_grad


def test_a_value_is_taken_as_it_is_before_it_is_written_to() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            zeros = torch.zeros(3, 2)
            x = x + 1
            zeros[:, 0] = x[:, 0]
            return zeros

    x = torch.randn(3, 2, requires_grad=True)
    gm = capture(Filled(), (x,)).module
    assert fake_values(gm, [x])["zeros"].requires_grad
    for node, written in (("add", False), ("copy_", True)):
        values = fake_values(gm, [x], taken_after={node: ("zeros",)})
        assert values["zeros"].requires_grad is written


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.sum().item())


class Chosen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Item, r"what 'item' returns depends on .* \(at return x \* int\(x\.sum\(\)\.item\(\)\)  # "),
        (Chosen, r"what 'index' returns depends on .* \(at return x\[x > 0\]\.sum\(\)  # "),
    ],
)
def test_what_depends_on_data_is_named_with_its_line(kind: type[nn.Module], text: str) -> None:
    x = torch.ones(3)
    module = capture(kind(), (x,)).module
    with pytest.raises(CaptureError, match=text) as caught:
        fake_values(module, [x])
    assert str(caught.value).endswith('frontend="modules"'), "torch's interpreter has put its words in"


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        peak = x.max()
        torch._check(peak.item() <= 9)  # a plain assert, but pytest rewrites those of its test files
        return x + peak


def test_a_number_that_is_only_asserted_need_not_be_known() -> None:
    x = torch.ones(3, dtype=torch.int64)
    values = fake_values(capture(Asserts(), (x,)).module, [x])
    assert isinstance(values["item"], UnknownNumber)
    assert values["max_1"].shape == ()
    assert values["add"].shape == (3,)


class Loops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.int64), x.detach().clone()
        with torch.no_grad():
            _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5), start)
        return x + y


def test_a_loop_whose_length_depends_on_data_has_the_shapes_of_what_it_carries() -> None:
    # torch's while_loop asks the mode for a place for open sizes: "'NoneType' object has no attribute ...".
    x = torch.ones(2, 3)
    values = fake_values(capture(Loops(), (x,)).module, [x])
    assert values["add"].shape == (2, 3)
    assert all(type(size) is int for size in values["add"].shape)


class Squeezing(nn.Module):
    """A library's, which loses the batch where it has one sample: cat then refuses what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cat([self.first(x).squeeze(), x]))


def test_torch_logs_nothing_of_sizes_that_are_tried_and_fail() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        module = capture(Squeezing(), (torch.randn(3, 2),)).module
    finally:
        log.removeHandler(handler)
    assert not seen
    assert module(torch.ones(4, 2)).shape == (8, 2)
