from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partita._torch.fake import UnknownNumber, fake_gradients, fake_values
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


def test_it_is_known_which_values_a_result_depends_on() -> None:
    _, values = _values()
    found = fake_gradients([values["linear_2"]], [values["linear_1"], values["a_weight"]])
    assert [gradient.shape for gradient in found.values()] == [
        values["linear_1"].shape,
        values["a_weight"].shape,
    ]
    _, values = _values()
    assert list(fake_gradients([values["linear_3"]], [values["linear_1"]]).values()) == [None]
    assert fake_gradients([values["linear_3"]], []) == {}
    real = torch.ones(1, requires_grad=True)
    assert fake_gradients([torch.ones(1, requires_grad=True)], [real]) == {id(real): None}


def test_a_gradient_lies_in_memory_as_autograd_would_make_it() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).transpose(0, 1)

    x = torch.randn(3, 4, requires_grad=True)
    values = fake_values(capture(Turned(), (x,)).module, [x])
    (gradient,) = fake_gradients([values["transpose"]], [values["mul"]]).values()
    result = (x * 2).transpose(0, 1)
    assert gradient.stride() == torch.ones_like(result).transpose(0, 1).stride()


class Spoilt(nn.Module):
    """Its second result can't be trained on: the gradient of exp needs its result, which is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        e = h.exp()
        side = e * 2
        e.detach().mul_(0.5)
        return h.sin(), side


def test_a_result_that_autograd_can_not_start_from_is_left_out() -> None:
    model, x = Spoilt(), torch.randn(3, 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x)[1].sum().backward()

    def found(*names: str) -> list[torch.Tensor | None]:
        values = fake_values(capture(model, (x,)).module, [x])
        return list(fake_gradients([values[name] for name in names], [values["linear"]]).values())

    (alone,) = found("sin")
    assert alone.shape == (3, 2)
    (beside,) = found("sin", "mul")
    assert beside.shape == (3, 2)
    assert found("mul") == [None]


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
    with pytest.raises(CaptureError, match=text):
        fake_values(module, [x])


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
