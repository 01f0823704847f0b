from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partita._torch.fake_module import run_on_fakes

CPU = torch.device("cpu")


class Stateful(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.tables, self.calls = [torch.zeros(4)], 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor | int]:
        self.calls += 1
        self.tables[0].add_(1)
        x.mul_(2.0)
        return {"out": self.drop(self.norm(x)) + y.t() + torch.rand(4), "calls": self.calls}


def test_shapes_are_found_and_nothing_changes() -> None:
    module = Stateful()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    x = torch.empty(3, 4, device="meta", requires_grad=True)
    output, written = run_on_fakes(module, (x,), {"y": torch.empty(4, 3)}, CPU)
    assert output["out"].shape == (3, 4)
    assert (output["out"].device, output["out"].requires_grad, output["calls"]) == (CPU, True, 1)
    assert written == [True, False]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (module.calls, module.tables[0].sum()) == (0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_strides_autocast_and_frozen_parameters_count() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    x = torch.empty(4, 3, device="meta").t()
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = run_on_fakes(module, (x,), {}, CPU)
    assert (output.dtype, output.requires_grad) == (torch.bfloat16, False)
    assert run_on_fakes(nn.Identity(), (x,), {}, CPU)[0].stride() == x.stride()


def test_what_only_data_could_tell_raises() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(RuntimeError):
        run_on_fakes(Branches(), (torch.empty(2),), {}, CPU)
