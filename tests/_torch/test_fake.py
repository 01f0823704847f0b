from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from partita._torch.fake import fake_values, reaches_all
from partita.capture import capture


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
    assert reaches_all(values["linear_2"], [values["linear_1"], values["a_weight"]])
    _, values = _values()
    assert not reaches_all(values["linear_3"], [values["linear_1"]])
    assert reaches_all(values["linear_3"], [])
    assert not reaches_all(torch.ones(1, requires_grad=True), [torch.ones(1, requires_grad=True)])
