from __future__ import annotations

import torch
from torch import Tensor, nn

from partita._torch.export.export import export_module
from partita.capture.tracing.relative_regions import make_regions_relative


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            low, high = torch.aminmax(self.a(x))
            with torch.enable_grad():
                kept = self.a(x)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                half = self.b(x)
        return self.a(x) + low - high, half, kept


def _settled(model: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    module = export_module(model, (x,), {}, way="eager")
    make_regions_relative(module)
    return module


def test_nested_regions_hold_and_the_mode_is_as_before() -> None:
    model, x = Nested(), torch.randn(3, 2)
    module = _settled(model, x)
    for actual, expected in zip(module(x), model(x), strict=True):
        assert torch.equal(actual, expected)
        assert actual.requires_grad is expected.requires_grad
    assert torch.is_grad_enabled()


def test_a_region_ends_in_the_callers_mode_and_not_in_that_of_the_trace() -> None:
    model, x = Nested(), torch.randn(3, 2)
    module = _settled(model, x)
    with torch.no_grad():
        result, _, _ = module(x)
        assert not torch.is_grad_enabled()
    assert not result.requires_grad


def test_weights_are_not_cached_and_devices_not_asserted() -> None:
    module = _settled(Nested(), torch.randn(3, 2))
    entered = [node for node in module.graph.nodes if node.target is torch.amp.autocast_mode._enter_autocast]
    assert [node.args for node in entered] == [("cpu", torch.bfloat16, True, False)]
    assert "assert" not in module.code


def test_the_gradient_of_a_weight_used_twice_under_autocast_is_summed_in_its_own_precision() -> None:
    """The one place where a captured graph is not the model bit for bit: it is nearer to the truth."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.a(self.a(x)).float()

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(4, 8)
    gradients = []
    for runner in (model, _settled(model, x)):
        model.zero_grad()
        runner(x).sum().backward()
        gradients.append(model.a.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2**-7, atol=2**-7)
    assert torch.equal(gradients[0], gradients[0].bfloat16().float())
    assert not torch.equal(gradients[1], gradients[1].bfloat16().float())
