from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from partita.verification.comparing.compare import Tolerance, compare_tensors, compare_values, count_leaves

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.booleans()), max_size=6),
)
def test_float32_tensors_are_equal_exactly_where_bits_are_or_both_are_nan(
    rows: list[tuple[int, int, bool]],
) -> None:
    left = [a for a, _, _ in rows]
    right = [a if same else b for a, b, same in rows]

    def value(bits: int) -> float:
        return float(struct.unpack("f", struct.pack("I", bits))[0])

    expected = all(
        a == b or (math.isnan(value(a)) and math.isnan(value(b))) for a, b in zip(left, right, strict=True)
    )
    tensors = [
        torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32) for bits in (left, right)
    ]
    assert (compare_tensors(tensors[0], tensors[1], "x") is None) == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_float_type_tells_one_bit_and_forgives_nan(dtype: torch.dtype) -> None:
    ones = torch.ones(3).to(dtype)
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    flipped = (ones.view(size) ^ torch.tensor([0, 1, 0], dtype=size)).view(dtype)
    assert compare_tensors(ones, ones.clone(), "x") is None
    mismatch = compare_tensors(flipped, ones, "x")
    assert mismatch is not None
    assert "1 of 3 elements differ, first at [1]" in mismatch.message
    assert "max ulp 1" in mismatch.message
    nan = torch.full((3,), torch.nan).to(dtype)
    assert compare_tensors(nan, nan.clone(), "x") is None
    assert compare_tensors(nan, ones, "x") is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64])
def test_integers_and_bools_are_compared(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype)
    assert compare_tensors(ones, ones.clone(), "x") is None
    mismatch = compare_tensors(zeros, ones, "x")
    assert mismatch is not None
    assert mismatch.max_abs == (None if dtype == torch.bool else 1.0)


def test_packed_four_bit_floats_are_compared_by_bytes() -> None:
    packed = [torch.full((2,), byte, dtype=torch.uint8).view(torch.float4_e2m1fn_x2) for byte in (0, 1)]
    assert compare_tensors(packed[0], packed[0].clone(), "x") is None
    assert compare_tensors(packed[0], packed[1], "x") is not None


def test_the_message_gives_the_values_and_three_distances() -> None:
    mismatch = compare_tensors(torch.tensor([[1.0, 2.5]]), torch.tensor([[1.0, 2.0]]), "x")
    assert mismatch is not None
    assert mismatch.message == (
        "1 of 2 elements differ, first at [0, 1]: 2.5, not 2.0; max abs 0.5, max rel 0.25, max ulp 2.097e+06"
    )
    assert mismatch.max_abs == 0.5


def test_views_that_are_not_contiguous_and_lazy_conjugates_are_compared_by_value() -> None:
    square = torch.arange(9.0).reshape(3, 3)
    assert compare_tensors(square.t(), square.t().contiguous(), "x") is None
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert compare_tensors(z.conj(), z.conj().resolve_conj(), "x") is None
    assert compare_tensors(z.conj(), z, "x") is not None
    assert compare_tensors(z.conj().imag, z.conj().resolve_conj().imag.clone(), "x") is None


def test_complex_parts_are_compared_bit_for_bit() -> None:
    zero, minus = torch.tensor([complex(0.0, 0.0)]), torch.tensor([complex(0.0, -0.0)])
    assert compare_tensors(minus, zero, "x") is not None
    assert compare_tensors(minus, zero, "x", Tolerance(atol=1e-9)) is None


@pytest.mark.parametrize(
    "build",
    [
        lambda t: t.to_sparse(),
        lambda t: t.to_sparse_csr(),
        lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
        lambda t: torch.nested.nested_tensor([t, t[:1]]),
    ],
    ids=["coo", "csr", "jagged", "nested"],
)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|inconsistent).*:UserWarning")
def test_layouts_other_than_strided_are_compared_by_value(build: object) -> None:
    tensor = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert callable(build)
    assert compare_tensors(build(tensor), build(tensor.clone()), "x") is None
    assert compare_tensors(build(tensor * 2), build(tensor), "x") is not None
    assert compare_tensors(build(tensor[:1]), build(tensor), "x") is not None


def test_tensors_without_memory_are_compared_by_what_describes_them() -> None:
    meta = torch.zeros(2, device="meta")
    assert compare_tensors(meta, torch.ones(2, device="meta"), "x") is None
    assert compare_tensors(meta, torch.zeros(3, device="meta"), "x") is not None


def test_wrappers_are_compared_by_the_tensors_that_they_wrap() -> None:
    """A quantised weight has no view of its bits, and torchao's error came instead of a comparison."""
    left, right = (TwoTensor(torch.ones(2), torch.tensor([1.0, end])) for end in (2.0, 3.0))
    assert compare_tensors(left, left.clone(), "x") is None
    mismatch = compare_tensors(left, right, "x")
    assert mismatch is not None
    assert "inner tensor 1: 1 of 2 elements differ, first at [1]: 2.0, not 3.0" in mismatch.message


def test_a_parameter_is_not_a_plain_tensor() -> None:
    mismatch = compare_tensors(torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), "x")
    assert mismatch is not None
    assert mismatch.message == "type is Tensor, not Parameter; requires_grad is False, not True"


def test_values_that_lead_back_to_themselves_end() -> None:
    def loop(last: int) -> list[object]:
        items: list[object] = [1, last]
        items.append(items)
        return items

    assert list(compare_values(loop(2), loop(2), "x")) == []
    assert [m.path for m in compare_values(loop(2), loop(3), "x")] == ["x[1]"]
    assert count_leaves(loop(2)) == 2


def test_numpy_arrays_are_compared_by_value() -> None:
    numpy = pytest.importorskip("numpy")
    assert list(compare_values(numpy.ones(2), numpy.ones(2), "x")) == []
    assert len(list(compare_values(numpy.ones(2), numpy.zeros(2), "x"))) == 1
    assert len(list(compare_values(numpy.ones(2), numpy.ones(2, dtype="f4"), "x"))) == 1


@pytest.mark.parametrize(("rtol", "atol"), [(-1.0, 0.0), (0.0, math.inf), (math.nan, 0.0)])
def test_a_tolerance_must_be_finite_and_not_negative(rtol: float, atol: float) -> None:
    with pytest.raises(ValueError, match="give a finite number that is at least 0"):
        Tolerance(rtol, atol)


class Record:
    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)


def test_attributes_may_have_been_set_in_any_order_and_keys_may_not() -> None:
    """tensordict sets them in another one where it is made by unflattening."""
    assert not list(compare_values(Record(a=1, b=2), Record(b=2, a=1), "out"))
    assert [it.path for it in compare_values(Record(a=1, b=2), Record(b=2, a=3), "out")] == ["out.a"]
    (mismatch,) = compare_values({"a": 1, "b": 2}, {"b": 2, "a": 1}, "out")
    assert "has its parts in the order ['a'], ['b'], not ['b'], ['a']" in str(mismatch)
