from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Never

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

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


def test_in_inference_mode_it_is_the_same() -> None:
    """The first call of a schedule of `PipelineStage`s, `eval` under it, ended in an error about version
    counters.
    """
    module = Stateful()
    with torch.inference_mode():
        output, written = run_on_fakes(module, (torch.empty(3, 4),), {"y": torch.empty(4, 3)}, CPU)
        assert torch.is_inference_mode_enabled()
    assert output["out"].shape == (3, 4)
    assert written == [True, False]


def test_a_mode_of_the_caller_does_not_see_it() -> None:
    """FLOPs counted around the first step of plain stages were those of the step and of what finds shapes."""
    module, x = nn.Linear(3, 3), torch.ones(2, 3)
    with FlopCounterMode(display=False) as flops:
        output, _ = run_on_fakes(module, (x,), {}, torch.device("cpu"))
        assert output.shape == (2, 3)
        assert flops.get_total_flops() == 0
        module(x)
    assert flops.get_total_flops() == 2 * 2 * 3 * 3


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


class Meeting(nn.Module):
    """Two threads are in it at once, and the one that came first leaves first."""

    def __init__(self) -> None:
        super().__init__()
        self.first_is_in, self.second_is_in, self.first_has_left = (threading.Event() for _ in range(3))

    def __deepcopy__(self, memo: dict[int, object]) -> Meeting:
        return self  # events can't be copied, and are what the threads share

    def forward(self, x: Tensor) -> Tensor:
        if not self.first_is_in.is_set():
            self.first_is_in.set()
            assert self.second_is_in.wait(30)
        else:
            self.second_is_in.set()
            assert self.first_has_left.wait(30)
        return x


def test_two_threads_at_once_leave_the_compiler_on() -> None:
    """Each put back what it had found: the second one that nothing is to be compiled, for good."""
    module, compiled = Meeting(), list[str]()

    def backend(gm: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        compiled.append("graph")
        return gm

    def first() -> None:
        run_on_fakes(module, (torch.empty(2),), {}, CPU)
        module.first_has_left.set()

    def second() -> None:
        assert module.first_is_in.wait(30)
        run_on_fakes(module, (torch.empty(2),), {}, CPU)

    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(first), threads.submit(second)]:
            future.result(30)
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert compiled == ["graph"]
