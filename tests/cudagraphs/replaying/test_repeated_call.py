from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from partita.cudagraphs import CudaGraphModule, ReplayRecorder
from partita.cudagraphs.replaying import module
from partita.cudagraphs.replaying.call_signature import describe_call


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The inputs of the calls that were described in full."""
    calls: list[Any] = []

    def describe(values: Any, *rest: Any, **options: Any) -> Any:
        calls.append(values)
        return describe_call(values, *rest, **options)

    monkeypatch.setattr(module, "describe_call", describe)
    return calls


def region_of(function: Callable[..., Any], **options: Any) -> CudaGraphModule:
    return CudaGraphModule(symbolic_trace(function), recorder=ReplayRecorder(), **options)


def scaled(x: torch.Tensor, w: torch.Tensor, n: float) -> torch.Tensor:
    return x @ w * n


def test_the_same_call_is_described_until_it_is_replayed(described: list[Any]) -> None:
    region, w = region_of(scaled, static_inputs=[1]), torch.randn(4, 4)
    with torch.no_grad():
        for step in range(6):
            x = torch.randn(2, 4)
            assert torch.equal(region(x, w, 2.0), scaled(x, w, 2.0))
            assert len(described) == min(step + 1, 3)
    assert region.cache_info().hits == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, n: (torch.randn(3, 4), w, n),
        lambda x, w, n: (torch.randn(4, 2).t(), w, n),
        lambda x, w, n: (x.double(), w.double(), n),
        lambda x, w, n: (x, w, 3.0),
        lambda x, w, n: (x, w, 2),
        lambda x, w, n: (x, w, -0.0),
        lambda x, w, n: (x, torch.randn(4, 4), n),
        lambda x, w, n: (x, nn.Parameter(w), n),
        lambda x, w, n: (w[:2], w, n),
        lambda x, w, n: (x, w, torch.tensor(2.0)),
    ],
    ids=["rows", "strides", "dtype", "value", "class", "sign", "address", "parameter", "shares", "tensor"],
)
def test_what_differs_is_described_and_computed_as_it_is(change: Any, described: list[Any]) -> None:
    region, w = region_of(scaled, static_inputs=[1]), torch.randn(4, 4)
    with torch.no_grad():
        for _ in range(4):
            region(torch.randn(2, 4), w, 2.0)
        described.clear()
        args = change(torch.randn(2, 4), w, 2.0)
        actual = region(*args)
        assert described
        assert actual.dtype == scaled(*args).dtype
        assert torch.equal(actual, scaled(*args))
        for _ in range(3):
            x = torch.randn(2, 4)
            assert torch.equal(region(x, w, 2.0), scaled(x, w, 2.0))


def test_a_weight_that_is_turned_where_it_lies_is_seen(described: list[Any]) -> None:
    """Its address and the object stay what they were."""
    region, w = region_of(scaled, static_inputs=[1]), nn.Parameter(torch.randn(4, 4))
    with torch.no_grad():
        for _ in range(4):
            region(torch.randn(2, 4), w, 2.0)
        w.data = w.data.t()
        x = torch.randn(2, 4)
        assert torch.equal(region(x, w, 2.0), scaled(x, w, 2.0))


def test_other_settings_are_seen(described: list[Any]) -> None:
    region, w = region_of(scaled, static_inputs=[1]), torch.randn(4, 4)
    with torch.no_grad():
        for _ in range(4):
            region(torch.randn(2, 4), w, 2.0)
        x = torch.randn(2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert region(x, w, 2.0).dtype == torch.bfloat16


def test_a_copied_input_on_memory_that_is_written_is_described(described: list[Any]) -> None:
    def total(x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        sums.add_(x)
        return sums + x

    region, sums = region_of(total, static_inputs=[1]), torch.zeros(4)
    with torch.no_grad():
        for _ in range(4):
            region(torch.ones(4), sums)
        described.clear()
        region(torch.ones(4), sums)
        assert not described
        expected = sums.clone()
        expected.add_(expected)
        assert torch.equal(region(sums, sums), expected + expected)
        assert described


def test_what_comes_to_lie_at_a_fixed_address_is_copied_no_more() -> None:
    """At first a region's input comes from elsewhere; then from another region, which is recorded later."""
    first = region_of(lambda x: x.sin())
    second = CudaGraphModule(
        symbolic_trace(lambda x: x.cos()),
        recorder=first.recorder,
        memory=first._memory,
        transient_outputs=[0],
    )
    with torch.no_grad():
        for _ in range(4):
            first(second(torch.ones(3)))
        x = torch.ones(3)
        assert torch.equal(first(second(x)), x.cos().sin())
        (*_, latest) = first._cache.repeated_calls()
        assert not latest.copied


def test_a_model_that_holds_its_weights_is_followed(described: list[Any]) -> None:
    layer = nn.Linear(3, 3)
    region = CudaGraphModule(symbolic_trace(layer), recorder=ReplayRecorder())
    x = torch.ones(2, 3)
    with torch.no_grad():
        for _ in range(4):
            region(x)
        described.clear()
        assert torch.equal(region(x), layer(x))
        assert not described
        region.gm.weight.data = torch.randn(3, 3)
        assert torch.equal(region(x), nn.functional.linear(x, region.gm.weight, region.gm.bias))
        assert described


def test_dropped_recordings_are_not_replayed() -> None:
    region = region_of(lambda x: x.sin())
    with torch.no_grad():
        for _ in range(4):
            region(torch.ones(2))
        region.clear()
        assert region.cache_info().size == 0
        assert torch.equal(region(torch.ones(2)), torch.ones(2).sin())
    assert region.cache_info().uncaptured == 2


def _calls_of_a_hit(parameters: int) -> int:
    """How many functions are called to replay a call of a region with so many parameters."""
    region = region_of(lambda x, *weights: x + weights[0], static_inputs=range(1, parameters + 1))
    args = [torch.ones(2) for _ in range(parameters + 1)]
    count = 0

    def counted(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with torch.no_grad():
        for _ in range(4):
            region(*args)
        sys.setprofile(counted)
        try:
            region(*args)
        finally:
            sys.setprofile(None)
    return count


def test_a_glance_at_a_call_takes_a_few_calls_a_parameter() -> None:
    """Else it would take longer than the launches that are saved: what it is found by is hashed but once."""
    assert _calls_of_a_hit(60) - _calls_of_a_hit(10) <= 50 * 3
