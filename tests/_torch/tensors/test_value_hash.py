from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partita._torch.tensors.value_hash import same_hash, value_hash

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_values_have_another_hash(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    other = torch.tensor([0, 1, 1, 0, 0]).to(dtype)
    assert same_hash(value_hash(values), value_hash(values.clone()))
    assert not same_hash(value_hash(values), value_hash(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_many_equal_values_and_another_order_are_seen(dtype: torch.dtype) -> None:
    """Torch's own hash was taken, which is 0 for an even count of equal values and the same in any order."""
    zeros = torch.zeros(6).to(dtype)
    assert not same_hash(value_hash(zeros), value_hash(torch.ones(6).to(dtype)))
    values = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype)
    assert not same_hash(value_hash(values), value_hash(values.flip(0)))
    assert not same_hash(value_hash(values.view(2, 3)), value_hash(values.view(2, 3).flip(0)))
    assert same_hash(value_hash(values.view(2, 3).t()), value_hash(values.view(2, 3).t().contiguous()))


def test_every_place_of_a_large_tensor_counts() -> None:
    x = torch.zeros(150_000)
    first = value_hash(x)
    for place in (0, 65_536, 149_999):
        other = x.clone()
        other[place] = 1
        assert not same_hash(first, value_hash(other))
    blocks = torch.cat([torch.zeros(65_536), torch.ones(65_536)])
    assert not same_hash(value_hash(blocks), value_hash(blocks.flip(0)))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_values_have_a_hash() -> None:
    """Their memory was looked at as integers, which ends the process."""
    values = torch.quantize_per_tensor(torch.arange(6.0), 0.1, 0, torch.qint8)
    other = torch.quantize_per_tensor(torch.arange(6.0).flip(0), 0.1, 0, torch.qint8)
    assert same_hash(value_hash(values), value_hash(values.clone()))
    assert not same_hash(value_hash(values), value_hash(other))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")]
)
def test_what_has_no_hash_is_not_compared(tensor: Tensor) -> None:
    assert value_hash(tensor) is None
    assert same_hash(None, value_hash(torch.ones(1)))


def test_nobody_sees_it() -> None:
    class Watch(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Watch() as watch:
        first = value_hash(x)
        assert same_hash(first, value_hash(x))
    assert watch.calls == 0


def test_where_values_lie_in_memory_does_not_count() -> None:
    values = torch.arange(20.0)
    for part in (values[1:], values[1:8], values[::2], values[:1]):
        assert same_hash(value_hash(part), value_hash(part.clone()))
        assert not same_hash(value_hash(part), value_hash(part + 1))
