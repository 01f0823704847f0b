"""What a stage, or the model, must be given: tensors by shape and dtype, and constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from partita._torch.export.signature import Signature
from partita._torch.tensors.tensor_text import dtype_and_shape
from partita.capture.open_sizes.sizes import Size, Sizes, evaluated
from partita.errors import SignatureMismatch

__all__ = ["Constant", "Value", "accept", "describe", "with_host_values"]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses a border, as the receiver must know it to allocate memory.

    Attributes:
        shape: numbers, or expressions over the open sizes (see `Routes.at`).
        requires_grad: whether a gradient comes back for it.
        fixed: for an input of the model, why its sizes are not open.
        bundle: it stands for several tensors, whose shapes come with the message.
        on_host: it lies on the CPU, in a model that is on other devices.
    """

    name: str
    shape: tuple[int | Size, ...]
    dtype: torch.dtype
    requires_grad: bool
    fixed: str = field(default="", compare=False)
    bundle: bool = False
    on_host: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor, sizes: Sizes | None = None) -> Value:
        """Return the description of ``tensor``; with ``sizes``, the shape that these have for its name."""
        shape: tuple[int | Size, ...] = tuple(tensor.shape)
        if sizes is not None:
            shape = sizes.shapes.get(name, shape)
        return cls(name, shape, tensor.dtype, bool(tensor.requires_grad))

    def at(self, sizes: Mapping[str, int]) -> Value:
        """Return a copy in which every size is a number."""
        return replace(self, shape=evaluated(self.shape, sizes))

    def describe(self) -> str:
        """Return it as text for messages."""
        return f"{self.name}: {_text(self.dtype, self.shape, self.requires_grad)}"

    def fits(self, value: object) -> bool:
        """Whether ``value`` is a tensor of this shape and dtype; an open size fits any."""
        return self.is_like(value) and (
            value.shape == self.shape
            or all(
                size == wanted or isinstance(wanted, Size)
                for size, wanted in zip(value.shape, self.shape, strict=True)
            )
        )

    def is_like(self, value: object) -> TypeGuard[Tensor]:
        """Whether ``value`` is a tensor of this dtype and of as many dimensions."""
        return isinstance(value, Tensor) and value.dtype == self.dtype and len(value.shape) == len(self.shape)


@dataclass(frozen=True, slots=True)
class Constant:
    """An input of the model that is no tensor: the graph is right for this one value only."""

    name: str
    value: Any

    def describe(self) -> str:
        """Return it as text for messages."""
        return f"{self.name} = {self.value!r}"

    def fits(self, value: object) -> bool:
        """Whether ``value`` is the one that the model was captured with."""
        return type(value) is type(self.value) and bool(value == self.value)


def with_host_values(
    crossing: Mapping[str, Value], examples: Mapping[str, object], devices: Collection[torch.device]
) -> dict[str, Value]:
    """Return what crosses, with a mark on what is on the CPU although the model's tensors are on others.

    Args:
        examples: what the model computed for its example, by name.
        devices: those of the model's parameters and buffers.
    """
    is_elsewhere = any(device.type not in ("cpu", "meta") for device in devices)

    def is_host(name: str) -> bool:
        example = examples.get(name)
        return is_elsewhere and isinstance(example, Tensor) and example.device.type == "cpu"

    return {name: replace(value, on_host=is_host(name)) for name, value in crossing.items()}


def accept(expected: Sequence[Value | Constant], flat: Sequence[Any], who: str, signature: Signature) -> None:
    """Check a model's flat inputs.

    Raises:
        SignatureMismatch: the number of inputs, a shape, a dtype or a constant differs.
    """
    if len(flat) != len(expected):
        raise SignatureMismatch(f"the model takes {len(expected)} inputs, {who} brings {len(flat)}")
    sizes = _open_sizes(expected, flat)
    for wanted, value in zip(expected, flat, strict=True):
        if (wanted.at(sizes) if sizes and isinstance(wanted, Value) else wanted).fits(value):
            continue
        actual = describe(value) if isinstance(wanted, Value) else repr(value)
        fixed = wanted.fixed if isinstance(wanted, Value) else ""
        here = ", ".join(f"{name} is {size}" for name, size in sizes.items())
        raise SignatureMismatch(
            f"{who} brings {actual} for {wanted.describe()}{f' where {here}' if here else ''}: give what the "
            "model was captured with"
            + (f", whose sizes are fixed, because of: {fixed}; or" if fixed else ", or")
            + " cut it again with other example arguments"
            + ("" if fixed else _how_open(expected, flat, signature))
        )


class _Dims(tuple[int, ...]):
    """Dimensions of an input, printed as ``torch.export`` takes those that stay open."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{dim}: Dim.AUTO' for dim in self)}}}" if self else "None"


def _how_open(expected: Sequence[Value | Constant], flat: Sequence[Any], signature: Signature) -> str:
    """How a model is cut with those sizes open in which its inputs differ, if that is all; else nothing."""
    opened: list[_Dims] = []
    differ = False
    for wanted, value in zip(expected, flat, strict=True):
        if isinstance(wanted, Constant) and wanted.fits(value):
            opened.append(_Dims())
        elif isinstance(wanted, Value) and wanted.is_like(value):
            closed = {dim for dim, size in enumerate(wanted.shape) if not isinstance(size, Size)}
            unlike = {dim for dim in closed if wanted.shape[dim] != value.shape[dim]}
            opened.append(_Dims(dim for dim in range(value.dim()) if dim not in closed - unlike))
            differ = differ or bool(unlike)
        else:
            return ""
    shapes = signature.by_parameter(opened) if differ else None
    if shapes is None:
        return ""
    return f", or with these sizes open: dynamic_shapes={shapes}, as torch.export has it"


def _open_sizes(expected: Sequence[Value | Constant], flat: Sequence[Any]) -> dict[str, int]:
    """The open sizes by name, each from the first input that has it; 0 where that lacks the dimension."""
    sizes: dict[str, int] = {}
    for wanted, value in zip(expected, flat, strict=True):
        for dim, size in enumerate(wanted.shape if isinstance(wanted, Value) else ()):
            if isinstance(size, Size) and size.text.isidentifier():
                has_dim = isinstance(value, Tensor) and dim < value.dim()
                sizes.setdefault(size.text, int(value.shape[dim]) if has_dim else 0)
    return sizes


def describe(value: object) -> str:
    """Return a tensor's dtype, shape and gradient flag, or the type of anything else, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return _text(value.dtype, tuple(value.shape), value.requires_grad)


def _text(dtype: torch.dtype, shape: tuple[int | Size, ...], requires_grad: bool) -> str:
    return f"{dtype_and_shape(dtype, shape)}{', with gradient' if requires_grad else ''}"
