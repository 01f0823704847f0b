from __future__ import annotations

import copy
from typing import Never

import pytest
import torch
from torch import Tensor, nn

from partita._torch.fake_module import run_on_fakes
from partita.errors import ExecutionError

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


class Replaced(nn.Module):
    """torchtitan replaces ``forward`` on the instance by a function that calls the old one. A copy went on to
    run the module itself, and left fake tensors in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.seen = nn.Linear(4, 4), None
        self.register_buffer("calls", torch.zeros(()))
        old = self.forward
        self.forward = lambda *args: old(*args)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        self.calls = self.calls + 1
        return self.lin(x)


def test_a_forward_that_was_replaced_runs_on_the_copy() -> None:
    module = Replaced()
    output, _ = run_on_fakes(module, (torch.empty(2, 4),), {}, CPU)
    assert (output.shape, module.seen, module.calls.item()) == ((2, 4), None, 0)


EVERYWHERE: dict[str, nn.Module] = {}


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        EVERYWHERE["module"].seen = x
        return x


def test_a_module_that_reaches_itself_elsewhere_is_refused_and_as_before() -> None:
    module = EVERYWHERE["module"] = Global()
    with pytest.raises(ExecutionError, match="reaches the module itself and changes 'seen' of it"):
        run_on_fakes(module, (torch.empty(2, 4),), {}, CPU)
    assert not hasattr(module, "seen")


def test_compiled_parts_run_as_they_are() -> None:
    """Compiling a checkpointed block for a run without data failed, and took long."""

    def backend(*_: object) -> Never:
        raise AssertionError("nothing is to be compiled")

    module = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend=backend), nn.ReLU())
    module[0].compile(backend=backend)
    assert run_on_fakes(module, (torch.empty(2, 4),), {}, CPU)[0].shape == (2, 4)
