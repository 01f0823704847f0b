"""From what a recording returned to what a caller may keep.

======================================  ============================================================
what the recording returned             what the caller gets
======================================  ============================================================
one of its inputs                       the caller's own tensor
a parameter or buffer of the graph      that tensor
a view of an input that was copied      the same view of the caller's own tensor
a view of an input used where it lies   that view
memory of its own                       a copy; views of one memory stay views of one copy
memory of its own that nobody keeps     that memory, good until the region's next replay
memory of its own for backward only     that memory: no replay as long as somebody has it
no tensor                               the value
======================================  ============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from partita._torch.tensors.copy_many import copy_many
from partita._torch.tensors.storage import storage_key
from partita._torch.tensors.storage_alias import StorageAlias
from partita._torch.tensors.subclasses import read_like

__all__ = ["CopiedOutputs", "Output", "OutputPlan", "placed", "plan_outputs"]


@dataclass
class CopiedOutputs:
    """What one call copies.

    Attributes:
        tensors: copies of the results that are copied whole, in their order.
        storages: copies of the memory that several results are views of, so far.
    """

    tensors: Sequence[torch.Tensor]
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)


Output = Callable[[Sequence[Any], CopiedOutputs], Any]
"""A function from the caller's inputs and what this call copies to one output."""


class OutputPlan:
    """How each output of one recording is made.

    Args:
        outputs: one function an output.
        copied: the results that are copied whole, see `CopiedOutputs`.
        saved: memory that is handed out as it is, and not to be overwritten while somebody has it.
        transient: memory that is handed out as it is, which the region's own next replay may overwrite.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        copied: Sequence[torch.Tensor] = (),
        saved: Sequence[StorageAlias] = (),
        transient: Sequence[StorageAlias] = (),
    ) -> None:
        self._outputs = outputs
        self._copied = copied
        dtypes = dict.fromkeys(tensor.dtype for tensor in copied)
        self._alike = [
            [number for number, tensor in enumerate(copied) if tensor.dtype == dtype] for dtype in dtypes
        ]
        self._saved = saved
        self._handed_out = (*saved, *transient)

    @property
    def hands_out_memory(self) -> bool:
        """Whether anything is handed out as it is."""
        return bool(self._handed_out)

    @property
    def in_use(self) -> bool:
        """Whether somebody still has what was saved: a replay would overwrite it."""
        return any(memory.is_read for memory in self._saved)

    @property
    def is_read(self) -> bool:
        """Whether somebody still has anything that was handed out as it is."""
        return any(memory.is_read for memory in self._handed_out)

    def take(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of the latest replay, for a caller who passed these inputs."""
        copies = CopiedOutputs([torch.empty_like(tensor) for tensor in self._copied])
        for numbers in self._alike:
            copy_many([copies.tensors[at] for at in numbers], [self._copied[at] for at in numbers])
        return [output(inputs, copies) for output in self._outputs]


def plan_outputs(
    results: Sequence[Any],
    inputs: Sequence[Any],
    copied: Sequence[int],
    state: Sequence[torch.Tensor] = (),
    transient: frozenset[int] = frozenset(),
    saved: frozenset[int] = frozenset(),
) -> OutputPlan:
    """Decide how the caller gets each result of a recording.

    Args:
        results: what the recording returned.
        inputs: those that it was recorded with, buffers among them.
        copied: indices of the buffers.
        state: parameters and buffers that the graph holds.
        transient: indices of the results that nobody keeps beyond the next replay.
        saved: indices of the results that only backward reads.
    """
    input_of = {
        storage_key(value): number for number, value in enumerate(inputs) if isinstance(value, torch.Tensor)
    }
    buffer_of = {storage_key(inputs[number]): number for number in copied}
    state_storages = {storage_key(value) for value in state}
    state_tensors = {id(value) for value in state}
    sharing: dict[int, int] = {}
    for result in results:
        if isinstance(result, torch.Tensor):
            sharing[storage_key(result)] = sharing.get(storage_key(result), 0) + 1

    def keys_but(numbers: frozenset[int]) -> set[int]:
        return {
            storage_key(result)
            for number, result in enumerate(results)
            if isinstance(result, torch.Tensor) and number not in numbers
        }

    # if one of several views is kept, all of them have to be views of its copy
    kept, copied_out = keys_but(transient), keys_but(transient | saved)
    saved_memory: dict[int, StorageAlias] = {}
    transient_memory: dict[int, StorageAlias] = {}
    plan: list[Output] = []
    whole: list[torch.Tensor] = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            plan.append(_constant(result))
            continue
        same = next((number for number, value in enumerate(inputs) if value is result), None)
        key = storage_key(result)
        if same is not None:
            plan.append(_input(same))
        elif id(result) in state_tensors:
            plan.append(_constant(result))
        elif key in state_storages:
            plan.append(_view(result))
        elif key in input_of:
            # of one that was copied, the buffer's: two may share memory, and then either of them is right
            number = buffer_of.get(key, input_of[key])
            plan.append(_view_of_input(result, number, inputs[number]))
        elif key not in copied_out and result.numel():
            plan.append(_in_place(result, saved_memory if key in kept else transient_memory))
        elif sharing[key] == 1 and _fills_storage(result) and not (result.is_conj() or result.is_neg()):
            plan.append(_copy(len(whole)))
            whole.append(result)
        else:
            plan.append(_view_of_copy(result))
    for memory in (*saved_memory.values(), *transient_memory.values()):
        memory.count_own_references()
    return OutputPlan(plan, whole, tuple(saved_memory.values()), tuple(transient_memory.values()))


def _constant(value: Any) -> Output:
    return lambda _inputs, _copies: value


def _input(number: int) -> Output:
    return lambda inputs, _copies: inputs[number]


def _view(result: torch.Tensor) -> Output:
    return lambda _inputs, _copies: result.view_as(result)


def _copy(number: int) -> Output:
    return lambda _inputs, copies: copies.tensors[number]


def _view_of_input(result: torch.Tensor, number: int, buffer: torch.Tensor) -> Output:
    """A view at the same place of the caller's tensor as it has in the buffer, in bytes."""
    recorded = storage_key(result)
    shift = result.storage_offset() * result.element_size() - buffer.storage_offset() * buffer.element_size()

    def view(inputs: Sequence[Any], _copies: CopiedOutputs) -> torch.Tensor:
        source = inputs[number]
        if storage_key(source) == recorded:  # used where it lies
            return result.detach()
        offset = source.storage_offset() * source.element_size() + shift
        return placed(result, source.untyped_storage(), offset // result.element_size())

    return view


def _view_of_copy(result: torch.Tensor) -> Output:
    key = storage_key(result)

    def view(_inputs: Sequence[Any], copies: CopiedOutputs) -> torch.Tensor:
        if key not in copies.storages:
            copies.storages[key] = result.untyped_storage().clone()
        return placed(result, copies.storages[key], int(result.storage_offset()))

    return view


def _in_place(result: torch.Tensor, aliases: dict[int, StorageAlias]) -> Output:
    memory = aliases.setdefault(storage_key(result), StorageAlias(result.untyped_storage()))
    base = placed(result, memory.storage, int(result.storage_offset()))
    return lambda _inputs, _copies: base.detach()


def placed(like: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """A tensor of the shape, strides and dtype of another one on this storage, ``offset`` in elements, read
    as that one is.
    """
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return read_like(like, empty.set_(storage, offset, like.shape, like.stride()))


def _fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a clone has the same strides, and copies no less than the whole memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.storage_offset() == 0
