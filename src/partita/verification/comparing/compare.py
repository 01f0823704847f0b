"""Comparing two values: bit for bit, unless a tolerance is given.

"Bit for bit" means that every element has the same bits, except that a NaN equals any NaN in the same place
(no model computes a NaN's payload on purpose). So ``-0.0`` differs from ``0.0``, and ``True`` from ``1``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from partita._torch.tensors.storage import has_memory
from partita._torch.tensors.subclasses import inner_tensors
from partita.errors import ArgumentError
from partita.verification.tree import children, has_equality, is_leaf, leaves

__all__ = ["EXACT", "Mismatch", "Tolerance", "compare_tensors", "compare_values", "count_leaves"]

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DESCRIBES = ("shape", "dtype", "device", "layout")
_MAX_TEXT = 120


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be apart: ``|candidate - reference| <= atol + rtol * |reference|``.

    Both 0, the default: the same bits.
    """

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if not 0.0 <= value < float("inf"):
                raise ArgumentError(f"{name} is {value!r}; give a finite number that is at least 0")

    @property
    def exact(self) -> bool:
        """Whether both are 0."""
        return self.rtol == 0.0 and self.atol == 0.0


EXACT = Tolerance()


@dataclass(frozen=True)
class Mismatch:
    """One place where two values differ."""

    path: str
    message: str
    max_abs: float | None = None


def compare_values(
    candidate: object,
    reference: object,
    path: str,
    tolerance: Tolerance = EXACT,
    *,
    strides: bool = False,
) -> Iterator[Mismatch]:
    """Return every place where two nested values differ, in order.

    >>> [m.path for m in compare_values({"a": 1, "b": (2, 3)}, {"a": 1, "b": (2, 4)}, "output")]
    ["output['b'][1]"]
    """
    yield from _compare(candidate, reference, path, tolerance, strides, set())


def count_leaves(value: object) -> int:
    """Return the number of leaves (tensors, numbers, None, ...) in a nested value."""
    return sum(1 for _ in leaves(value))


def compare_tensors(
    candidate: torch.Tensor,
    reference: torch.Tensor,
    path: str,
    tolerance: Tolerance = EXACT,
    *,
    strides: bool = False,
) -> Mismatch | None:
    """Compare type, shape, dtype, device, layout, ``requires_grad`` and elements; strides where asked for."""
    facts = _facts(candidate, strides), _facts(reference, strides)
    unequal = [
        f"{name} is {mine}, not {theirs}"
        for (name, mine), (_, theirs) in zip(*facts, strict=True)
        if mine != theirs
    ]
    # Elements can be compared wherever all that describes them is equal.
    described = all(mine == theirs for mine, theirs in zip(*facts, strict=True) if mine[0] in _DESCRIBES)
    elements = _compare_elements(candidate, reference, tolerance) if described else None
    if elements is not None:
        unequal.append(elements.message)
    if not unequal:
        return None
    return Mismatch(path, "; ".join(unequal), elements.max_abs if elements is not None else None)


def _compare(
    candidate: Any,
    reference: Any,
    path: str,
    tolerance: Tolerance,
    strides: bool,
    open_ids: set[tuple[int, int]],
) -> Iterator[Mismatch]:
    if isinstance(candidate, torch.Tensor) and isinstance(reference, torch.Tensor):
        mismatch = compare_tensors(candidate, reference, path, tolerance, strides=strides)
        if mismatch is not None:
            yield mismatch
        return
    if type(candidate) is not type(reference):
        yield Mismatch(path, f"is {_describe(candidate)}, not {_describe(reference)}")
        return
    mine, theirs = children(candidate), children(reference)
    if mine is None and theirs is None:
        if not _same_atom(candidate, reference, tolerance):
            yield Mismatch(path, f"is {_describe(candidate)}, not {_describe(reference)}")
        return
    mine, theirs = mine or [], theirs or []
    if _suffixes(mine) != _suffixes(theirs):  # in which order attributes were set is nobody's business
        mine, theirs = (sorted(its, key=_attribute) for its in (mine, theirs))
    if _suffixes(mine) != _suffixes(theirs):
        yield Mismatch(path, _structure_message(mine, theirs))
        return
    pair = (id(candidate), id(reference))
    if pair in open_ids:
        return
    open_ids.add(pair)
    for (suffix, left), (_, right) in zip(mine, theirs, strict=True):
        yield from _compare(left, right, path + suffix, tolerance, strides, open_ids)
    open_ids.discard(pair)


def _suffixes(parts: list[tuple[str, Any]]) -> list[str]:
    return [suffix for suffix, _ in parts]


def _attribute(part: tuple[str, Any]) -> str:
    """The name of an attribute; items come first, in their order."""
    suffix, _ = part
    return suffix if suffix.startswith(".") else ""


def _structure_message(mine: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> str:
    left, right = _suffixes(mine), _suffixes(theirs)
    if sorted(left) == sorted(right):
        return f"has its parts in the order {', '.join(left)}, not {', '.join(right)}"
    missing = [suffix for suffix in right if suffix not in set(left)]
    added = [suffix for suffix in left if suffix not in set(right)]
    parts = [f"lacks {', '.join(missing)}"] if missing else []
    parts += [f"has {', '.join(added)} in addition"] if added else []
    return f"has {len(left)} parts, not {len(right)}: {' and '.join(parts)}"


def _same_atom(candidate: Any, reference: Any, tolerance: Tolerance) -> bool:
    if candidate is reference:
        return True
    if isinstance(candidate, float):
        return _same_float(candidate, reference, tolerance)
    if isinstance(candidate, complex):
        return _same_float(candidate.real, reference.real, tolerance) and _same_float(
            candidate.imag, reference.imag, tolerance
        )
    if isinstance(candidate, torch.Generator):
        return torch.equal(candidate.get_state(), reference.get_state())
    if isinstance(candidate, FunctionType):
        return candidate.__qualname__ == reference.__qualname__
    if hasattr(candidate, "tobytes") and hasattr(candidate, "dtype"):  # an array of numpy's kind
        return bool(
            candidate.dtype == reference.dtype
            and candidate.shape == reference.shape
            and candidate.tobytes() == reference.tobytes()
        )
    if not has_equality(candidate):
        # Only its type can be compared, and that was done before.
        return is_leaf(candidate)
    return bool(candidate == reference)


def _same_float(candidate: float, reference: float, tolerance: Tolerance) -> bool:
    if struct.pack("d", candidate) == struct.pack("d", reference):
        return True
    if candidate != candidate and reference != reference:
        return True
    if tolerance.exact:
        return False
    return abs(candidate - reference) <= tolerance.atol + tolerance.rtol * abs(reference)


def _facts(tensor: torch.Tensor, strides: bool) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("type", type(tensor).__name__),
        ("shape", _shape(tensor)),
        ("dtype", tensor.dtype),
        ("device", tensor.device),
        ("layout", tensor.layout),
        ("requires_grad", tensor.requires_grad),
    ]
    if strides:
        strided = tensor.layout == torch.strided and not tensor.is_nested
        facts.append(("stride", tensor.stride() if strided else None))
    return facts


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.is_nested:
        # A jagged dimension is a symbol, which no two tensors share: its components have plain shapes.
        return ("nested", *(tuple(part.shape) for part in tensor.unbind()))
    return tuple(tensor.shape)


def _compare_elements(
    candidate: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance
) -> Mismatch | None:
    if not has_memory(candidate) or not has_memory(reference):
        return None  # on the meta device, or fake: there are no elements
    candidate, reference = candidate.detach(), reference.detach()
    if candidate.is_nested:
        return _compare_parts(list(candidate.unbind()), list(reference.unbind()), "component", tolerance)
    inner, other_inner = inner_tensors(candidate), inner_tensors(reference)
    if inner is not None and other_inner is not None:  # they may know few operations
        return _compare_parts(inner, other_inner, "inner tensor", tolerance)
    if candidate.layout == torch.sparse_coo:
        left, right = candidate.coalesce(), reference.coalesce()
        parts = [left.indices(), left.values()], [right.indices(), right.values()]
        return _compare_parts(*parts, "indices and values, part", tolerance)
    if candidate.layout != torch.strided:
        candidate, reference = candidate.to_dense(), reference.to_dense()
    if candidate.is_quantized:
        candidate, reference = candidate.dequantize(), reference.dequantize()
    unequal = _unequal(candidate, reference, tolerance)
    if not bool(unequal.any()):
        return None
    return _describe_elements(candidate, reference, unequal)


def _compare_parts(
    candidate: list[torch.Tensor], reference: list[torch.Tensor], what: str, tolerance: Tolerance
) -> Mismatch | None:
    if len(candidate) != len(reference):
        return Mismatch("", f"has {len(candidate)} components, not {len(reference)}")
    for number, (left, right) in enumerate(zip(candidate, reference, strict=True)):
        mismatch = compare_tensors(left, right, "", tolerance)
        if mismatch is not None:
            return Mismatch("", f"{what} {number}: {mismatch.message}", mismatch.max_abs)
    return None


def _unequal(candidate: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> torch.Tensor:
    """A bool tensor of the same shape: which elements differ."""
    if candidate.is_complex():
        if not tolerance.exact:
            return ~torch.isclose(
                candidate, reference, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
            )
        left, right = (torch.view_as_real(side.resolve_conj()) for side in (candidate, reference))
        return _unequal(left, right, tolerance).any(dim=-1)
    if not candidate.is_floating_point():
        return candidate != reference
    if not tolerance.exact:
        left, right = candidate.double(), reference.double()
        return ~torch.isclose(left, right, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    integer = _INTEGER_OF_SIZE[candidate.element_size()]
    unequal = candidate.resolve_neg().view(integer) != reference.resolve_neg().view(integer)
    if not bool(unequal.any()) or (candidate.element_size() == 1 and not _widens(candidate)):
        return unequal
    return unequal & ~(_is_nan(candidate) & _is_nan(reference))


def _widens(tensor: torch.Tensor) -> bool:
    # Two four-bit floats packed in a byte have no conversion to a wider type, and no NaN either.
    return "float4" not in str(tensor.dtype)


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() if tensor.element_size() == 1 else tensor).isnan()


def _describe_elements(candidate: torch.Tensor, reference: torch.Tensor, unequal: torch.Tensor) -> Mismatch:
    index = tuple(unequal.nonzero()[0].tolist())
    count = int(unequal.sum())
    place = f", first at {list(index)}" if index else ""
    text = (
        f"{count} of {unequal.numel()} elements differ{place}: {_number(candidate[index])}, "
        f"not {_number(reference[index])}"
    )
    if candidate.dtype == torch.bool or not _widens(candidate):
        return Mismatch("", text)
    wide = torch.complex128 if candidate.is_complex() else torch.float64
    left, right = candidate[unequal].to(wide), reference[unequal].to(wide)
    gap = (left - right).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    max_abs = float(gap.max())
    text += f"; max abs {max_abs:.3g}"
    if candidate.is_complex() or candidate.is_floating_point():
        text += f", max rel {float((gap / right.abs()).nan_to_num(nan=0.0, posinf=torch.inf).max()):.3g}"
    if candidate.is_floating_point():
        text += f", max ulp {_ulps(candidate[unequal], reference[unequal]):.4g}"
    return Mismatch("", text, max_abs)


def _number(element: torch.Tensor) -> str:
    return repr(element.item()) if _widens(element) else repr(element.view(torch.uint8).item())


def _ulps(candidate: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest number of representable values between two floats (rounded to a double)."""
    size = candidate.element_size()
    integer = torch.int8 if size == 1 else _INTEGER_OF_SIZE[size]
    largest = torch.iinfo(integer).max

    def rank(tensor: torch.Tensor) -> torch.Tensor:
        # From sign and magnitude to a number line: -0.0 and 0.0 are both 0, neighbours are one apart.
        bits = tensor.view(integer).long()
        return torch.where(bits < 0, -(bits & largest), bits)

    left, right = rank(candidate), rank(reference)
    # Across zero the distance between two doubles may not fit in 64 bits.
    exact, rough = (left - right).abs(), (left.double() - right.double()).abs()
    return float(torch.where((left < 0) == (right < 0), exact.double(), rough).max())


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} with shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return _shorten(repr(value))
    describe: Callable[[object], str] = repr if is_leaf(value) else lambda _: "..."
    return _shorten(f"{type(value).__name__} {describe(value)}")


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
