"""Recording which operators a function calls, on which tensors, without letting any of it be seen.

Stands for the capture of a CUDA graph where there is no GPU. While a graph is captured nothing runs; here
everything runs, since the CPU has no other way to learn of the results, but what was written is put back, and
so are the random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from partita._torch.operators.schemas import operator_facts
from partita._torch.tensors.storage import storage_key
from partita.errors import ExecutionError

__all__ = ["RecordedCall", "WholeCall", "record_calls"]

_REFUSED = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
)
_RESHAPING = frozenset(f"aten::{name}_" for name in ["squeeze", "unsqueeze", "t", "transpose", "as_strided"])


@dataclass(frozen=True)
class RecordedCall:
    """One call of an operator.

    Attributes:
        function: the operator.
        args, kwargs: tensors in them stand for memory, not for the Python objects of the first run.
        results: the tensors that it returned.
        fresh: for each of them, whether the operator allocated it.
        addresses: of the tensors in ``args`` and ``kwargs``.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...]
    fresh: tuple[bool, ...]
    addresses: tuple[int, ...]

    def run(self) -> None:
        """Call it again; what it allocates now is copied to where it was then.

        Raises:
            ExecutionError: a tensor lies elsewhere now.
        """
        if tuple(tensor.data_ptr() for tensor in _tensors((self.args, self.kwargs))) != self.addresses:
            raise ExecutionError(
                f"the memory of an operand of {self.function} has moved since the recording: record again"
            )
        again = _tensors(self.function(*self.args, **self.kwargs))
        for old, new, fresh in zip(self.results, again, self.fresh, strict=True):
            if fresh:
                old.copy_(new)


class WholeCall:
    """A compiled function, which a recording lists as one call: its kernels work on bare addresses, so the
    operators that it stands for can't be seen. Outside of a recording it is just the function.

    Args:
        function: of flat arguments.
        written: indices of the arguments that it writes.
    """

    def __init__(self, function: Callable[..., Any], written: Collection[int] = ()) -> None:
        self.function = function
        self.written = frozenset(written)

    def __call__(self, *args: Any) -> Any:
        recorder = _ACTIVE.get()
        return self.function(*args) if recorder is None else recorder.note_whole(self, args)


def record_calls(function: Callable[[], Any]) -> tuple[Any, list[RecordedCall]]:
    """Call ``function``, and list the operators that it called in order.

    Memory that existed before holds afterwards what it held, and the CPU's default generator is where it was.

    Raises:
        ExecutionError: the function reads a value (``item``), or an operator's shape depends on data: on a
            GPU the capture would fail.
    """
    state = torch.default_generator.get_state()
    mode = _Recorder()
    token = _ACTIVE.set(mode)
    try:
        with mode:
            result = function()
    finally:
        _ACTIVE.reset(token)
        for storage, content in mode.before.values():
            storage.copy_(content)
        torch.default_generator.set_state(state)
    return result, mode.calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._only_reshapes(func, args):
            return func(*args, **kwargs)  # nothing runs; later calls hold the tensor as it is from now on
        refused = _REFUSED.intersection(func.tags)
        if refused and not (func._schema.name == "aten::index" and not _has_mask(args[1])):
            raise ExecutionError(
                f"{func} can't be recorded ({', '.join(map(str, refused))}): leave it outside of the region"
            )
        self._keep_written(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def note_whole(self, call: WholeCall, args: Any) -> Any:
        """Run a compiled function, and list it as one call."""
        with _disable_current_modes():
            for number in call.written:
                self._keep(args[number])
            result = call.function(*args)
            self._note(call.function, args, {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        operands = {storage_key(tensor) for tensor in _tensors((args, kwargs))}
        results = tuple(_tensors(result))
        fresh = tuple(storage_key(tensor) not in operands for tensor in results)
        for tensor, new in zip(results, fresh, strict=True):
            if new:
                self._own[storage_key(tensor)] = tensor.untyped_storage()
        kept_args, kept_kwargs = tree_map(_memory_of, (args, kwargs))
        addresses = tuple(tensor.data_ptr() for tensor in _tensors((kept_args, kept_kwargs)))
        kept = tuple(map(_memory_of, results))
        self.calls.append(RecordedCall(func, kept_args, kept_kwargs, kept, fresh, addresses))

    def _only_reshapes(self, func: Any, args: Any) -> bool:
        """Whether a call only changes the shape of a tensor that was made while recording."""
        return func._schema.name in _RESHAPING and storage_key(args[0]) in self._own

    def _keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep the content of what a call writes."""
        for argument in operator_facts(func)[0].arguments:
            if argument.written:
                self._keep(argument.value_in(args, kwargs))

    def _keep(self, value: Any) -> None:
        """Copy the storages of tensors, once each, but not those that were allocated while recording."""
        for tensor in _tensors(value):
            key = storage_key(tensor)
            if key not in self._own and key not in self.before:
                storage = tensor.untyped_storage()
                self.before[key] = (storage, storage.clone())


_ACTIVE: ContextVar[_Recorder | None] = ContextVar("_ACTIVE", default=None)


def _has_mask(indices: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(indices))


def _memory_of(value: Any) -> Any:
    """Return a new tensor on the memory that a tensor has now, wherever the tensor moves later."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
