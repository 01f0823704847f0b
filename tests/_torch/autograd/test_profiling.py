from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from partita._torch.autograd.profiling import is_profiling, is_read_by_profiler, profiler_range


class _Reads(TorchFunctionMode):
    """For each gradient that is read, whether it is the profiler that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_profiler: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.grad.__get__:  # type: ignore[attr-defined]
            self.by_profiler.append(is_read_by_profiler())
        return func(*args, **(kwargs or {}))


class _ReadsItsOwn(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.grad is None
        return super().forward(x)


def test_a_range_is_in_the_profile_where_it_is_wanted() -> None:
    assert not is_profiling()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert is_profiling()
        with profiler_range("shown"), profiler_range("hidden", wanted=False):
            pass
    assert {event.name for event in profiler.events()} & {"shown", "hidden"} == {"shown"}


def test_gradients_that_a_profiler_reads_are_told_from_those_that_a_model_reads() -> None:
    model, x = _ReadsItsOwn(2, 2), torch.ones(1, 2)
    with _Reads() as unprofiled:
        model(x)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True), _Reads() as profiled:
        model(x)
    assert unprofiled.by_profiler == [False]
    assert profiled.by_profiler == [True, True, False]  # of weight and bias, then in forward
