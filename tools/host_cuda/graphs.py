"""CUDA graphs of the host's device: a capture notes the operators, and a replay runs them again.

As on a real device nothing is computed by a capture: what it wrote is undone, random numbers included, and
what it made holds garbage until the first replay. A capture in which the host would wait for the device, or
copies from or to it, fails.
"""

# ruff: noqa: SLF001, PLC2701, TID251 - it stands in for a part of torch
from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CUDAGraph"]

_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
}
_MASKED = {"index", "index_put_", "_index_put_impl_"}
_GARBAGE = 0x7F


class _Call(NamedTuple):
    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


class _Capture(TorchDispatchMode):
    """Runs operators on the device, and notes them.

    Attributes:
        calls: those that make or write something, in order.
        made: the memory that they made, by its address.
        written: the memory that was there before and that they wrote, with what was in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.made: dict[int, UntypedStorage] = {}
        self.written: dict[int, tuple[UntypedStorage, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _on_device((args, kwargs))
        _check(func, args, kwargs, waits=bool(inputs))
        for place, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                self._remember(_on_device(value))
        result = func(*args, **kwargs)
        outputs, before = _on_device(result), set(map(_address, inputs))
        new = [tensor for tensor in outputs if _address(tensor) not in before]
        self.made.update((_address(tensor), tensor.untyped_storage()) for tensor in new)
        if new or func._schema.is_mutable:
            self.calls.append(_Call(func, args, kwargs, outputs))
        return result

    def _remember(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if _address(tensor) not in self.made and _address(tensor) not in self.written:
                memory = tensor.untyped_storage()
                self.written[_address(tensor)] = memory, _bytes_of(memory).clone()

    def undo(self) -> None:
        for memory, values in self.written.values():
            _bytes_of(memory).copy_(values)
        for memory in self.made.values():
            _bytes_of(memory).fill_(_GARBAGE)


class CUDAGraph:
    """As ``torch.cuda.CUDAGraph``."""

    _capturing: ClassVar[int] = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self._capture = _Capture()
        self._random = torch.empty(0)

    @classmethod
    def is_capturing(cls) -> bool:
        """Whether a capture is under way."""
        return cls._capturing > 0

    def register_generator_state(self, generator: Any) -> None:
        """A replay draws from the device's generator."""

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Note what is called from now on."""
        self._random = torch.cuda.get_rng_state()
        self._capture.__enter__()
        CUDAGraph._capturing += 1

    def capture_end(self) -> None:
        """End the capture, and undo what it computed."""
        CUDAGraph._capturing -= 1
        self._capture.__exit__(None, None, None)
        self._capture.undo()
        torch.cuda.set_rng_state(self._random)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def replay(self) -> None:
        """Run the operators again, on the memory of the capture."""
        for call in self._capture.calls:
            again = _on_device(call.operator(*call.args, **call.kwargs))
            for tensor, value in zip(call.outputs, again, strict=True):
                if _address(tensor) != _address(value):
                    tensor.copy_(value)

    def reset(self) -> None:
        """Forget the capture."""
        self._capture = _Capture()

    def pool(self) -> None:
        """Each capture has memory of its own."""


def _check(func: Any, args: Any, kwargs: Any, *, waits: bool) -> None:
    name = func._schema.name.removeprefix("aten::")
    is_masked = name in _MASKED and any(
        isinstance(index, Tensor) and index.dtype in {torch.bool, torch.uint8} for index in args[1]
    )
    crosses = False
    if name == "copy_":
        crosses = args[0].device.type != args[1].device.type
    elif name == "_to_copy":
        crosses = torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
    if crosses or (waits and (name in _WAITING or is_masked)):
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")


def _on_device(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_cuda]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(memory: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(memory)
