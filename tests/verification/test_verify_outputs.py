"""Differences of outputs: structure, types, shapes, dtypes, elements; strides and tolerances."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.verification.nets import X, assert_only, kinds

from partita.errors import VerificationFailed
from partita.verification import verify

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    loss: torch.Tensor
    note: str


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """A dict whose keys are attributes too, as model libraries return it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Cache:
    """An ordinary object, registered nowhere."""

    def __init__(self, keys: list[torch.Tensor]) -> None:
        self.keys = keys


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (lambda t: (1, [t, None]), "output[1][0]"),
        (lambda t: {"a": {"b": t}}, "output['a']['b']"),
        (lambda t: Pair(1, t), "output.right"),
        (lambda t: Record(t, "x"), "output.loss"),
        (lambda t: ModelOutput(logits=t, other=None), "output['logits']"),
        (lambda t: Cache([t]), "output.keys[0]"),
    ],
)
def test_outputs_are_compared_however_they_are_nested(build: Callable[..., Any], where: str) -> None:
    assert verify(lambda x: build(x * 2), lambda x: build(x * 2), (X,)).ok
    assert_only(verify(lambda x: build(x * 3), lambda x: build(x * 2), (X,)), "output", where)


@pytest.mark.parametrize(
    ("candidate", "reference", "message"),
    [
        (lambda x: x.double(), lambda x: x.clone(), "dtype is torch.float64, not torch.float32"),
        (lambda x: (x * 1).reshape(4, 3), lambda x: x * 1, r"shape is \(4, 3\), not \(3, 4\)"),
        (lambda x: [x * 1], lambda x: (x * 1,), "is list ..., not tuple ..."),
        (lambda x: None, lambda x: x * 0, "is None, not a tensor"),
        (lambda x: {"a": 1, "b": 2}, lambda x: {"b": 2, "a": 1}, "in the order"),
        (lambda x: {"a": 1}, lambda x: {"a": 1, "b": 2}, r"lacks \['b'\]"),
        (lambda x: 1, lambda x: True, "is 1, not True"),
        (lambda x: 1, lambda x: 1.0, "is 1, not 1.0"),
        (lambda x: -0.0, lambda x: 0.0, "is -0.0, not 0.0"),
        (lambda x: torch.tensor(-0.0), lambda x: torch.tensor(0.0), "1 of 1 elements"),
        (
            lambda x: torch.tensor([1, 2]),
            lambda x: torch.tensor([1, 3]),
            r"first at \[1\]: 2, not 3; max abs 1",
        ),
        (
            lambda x: torch.tensor([1.0, torch.nan]),
            lambda x: torch.tensor([1.0, 2.0]),
            r"nan, not 2.0; max abs inf",
        ),
        (lambda x: torch.tensor([1j, 2j]), lambda x: torch.tensor([1j, 2j + 1]), r"first at \[1\]"),
        (lambda x: x.bfloat16() * 1.01, lambda x: x.bfloat16(), "max ulp"),
        (lambda x: torch.empty(0, 3), lambda x: torch.empty(3, 0), "shape"),
        (lambda x: "a", lambda x: "b", "is 'a', not 'b'"),
    ],
)
def test_outputs_that_differ_are_reported(
    candidate: Callable[..., Any], reference: Callable[..., Any], message: str
) -> None:
    result = verify(candidate, reference, (X,))
    assert kinds(result) == {"output"}
    with pytest.raises(VerificationFailed, match=message):
        result.check()


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        torch.tensor([torch.nan, 1.0]),
        torch.tensor([complex("nan")]),
        torch.empty(0),
        None,
        3,
        "s",
    ],
)
def test_equal_outputs_of_every_sort_are_equal(value: object) -> None:
    assert verify(lambda: copy.deepcopy(value), lambda: copy.deepcopy(value), ()).ok


def test_outputs_may_be_computed_differently() -> None:
    assert verify(lambda x: x > 0, lambda x: x >= 0, (X,)).ok  # no element of X is zero


def test_a_nan_equals_a_nan_with_another_payload() -> None:
    quiet, other = (torch.tensor([bits]).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert verify(lambda: quiet * 1, lambda: other * 1, ()).ok


def test_strides_count_only_on_request() -> None:
    def transposed(x: torch.Tensor) -> torch.Tensor:
        return (x * 1).t().contiguous().t()

    assert verify(transposed, lambda x: x * 1, (X,)).ok
    result = verify(transposed, lambda x: x * 1, (X,), strides=True)
    assert "stride is (1, 3), not (4, 1)" in str(result)


def test_a_tolerance_forgives_rounding_and_nothing_else() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * 2 * (1 + 1e-6)

    result = verify(noisy, lambda x: x * 2, (X,))
    assert not result.ok
    assert 0 < result.differences[0].max_abs < 1e-4  # type: ignore[operator]
    assert verify(noisy, lambda x: x * 2, (X,), rtol=1e-4).ok
    assert not verify(noisy, lambda x: x * 3, (X,), rtol=1e-4).ok
    assert not verify(lambda x: (x * 2).double(), lambda x: x * 2, (X,), rtol=1e-4).ok
