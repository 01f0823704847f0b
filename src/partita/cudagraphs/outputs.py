"""From what a recording returned to what a caller may keep.

======================================  ============================================================
what the recording returned             what the caller gets
======================================  ============================================================
one of its inputs                       the caller's own tensor
a parameter or buffer of the graph      that tensor
a view of an input that was copied      the same view of the caller's own tensor
a view of an input used where it lies   that view
memory of its own                       a copy; views of one memory stay views of one copy
memory of its own that nobody keeps     that memory, good until the next replay
no tensor                               the value
======================================  ============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita._torch.storage import storage_key

__all__ = ["Output", "OutputPlan", "plan_outputs"]

Output = Callable[[Sequence[Any], dict[int, torch.UntypedStorage]], Any]
"""From the caller's inputs, and the storages copied so far in this call, to one output."""


class OutputPlan:
    """How each output of one recording is made."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._outputs = outputs

    def take(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the latest replay, for a caller who passed these inputs."""
        copies: dict[int, torch.UntypedStorage] = {}
        return [output(inputs, copies) for output in self._outputs]


def plan_outputs(
    results: Sequence[Any],
    given: Sequence[Any],
    copied: Sequence[int],
    state: Sequence[torch.Tensor] = (),
    transient: frozenset[int] = frozenset(),
) -> OutputPlan:
    """Decide for each result of a recording.

    Args:
        results: what the recording returned.
        given: the inputs that it was recorded with, buffers among them.
        copied: indices of the buffers.
        state: parameters and buffers that the graph holds.
        transient: indices of the results that nobody keeps beyond the next replay.
    """
    buffers = {storage_key(given[number]): number for number in copied}
    foreign = {storage_key(value) for value in (*given, *state) if isinstance(value, torch.Tensor)}
    held = {id(value) for value in state}
    sharing: dict[int, int] = {}
    for result in results:
        if isinstance(result, torch.Tensor):
            sharing[storage_key(result)] = sharing.get(storage_key(result), 0) + 1
    # if one of several views is kept, all of them have to be views of its copy
    kept = {
        storage_key(result)
        for number, result in enumerate(results)
        if isinstance(result, torch.Tensor) and number not in transient
    }
    plan: list[Output] = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            plan.append(_constant(result))
            continue
        same = next((number for number, value in enumerate(given) if value is result), None)
        key = storage_key(result)
        if same is not None:
            plan.append(_input(same))
        elif id(result) in held:
            plan.append(_constant(result))
        elif key in buffers:
            plan.append(_view_of_input(result, buffers[key], given[buffers[key]]))
        elif key in foreign:
            plan.append(_view(result))
        elif key not in kept:
            plan.append(_memory(result))
        elif sharing[key] == 1 and _fills_storage(result):
            plan.append(_copy(result))
        else:
            plan.append(_view_of_copy(result))
    return OutputPlan(plan)


def _constant(value: Any) -> Output:
    return lambda _inputs, _copies: value


def _input(number: int) -> Output:
    return lambda inputs, _copies: inputs[number]


def _view(result: torch.Tensor) -> Output:
    return lambda _inputs, _copies: result.view_as(result)


def _memory(result: torch.Tensor) -> Output:
    return lambda _inputs, _copies: result.detach()


def _copy(result: torch.Tensor) -> Output:
    return lambda _inputs, _copies: result.clone()


def _view_of_input(result: torch.Tensor, number: int, buffer: torch.Tensor) -> Output:
    """A view at the same place of the caller's tensor as it has in the buffer, in bytes."""
    shift = result.storage_offset() * result.element_size() - buffer.storage_offset() * buffer.element_size()

    def view(inputs: Sequence[Any], _copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        source = inputs[number]
        offset = source.storage_offset() * source.element_size() + shift
        return _placed(result, source.untyped_storage(), offset // result.element_size())

    return view


def _view_of_copy(result: torch.Tensor) -> Output:
    key = storage_key(result)

    def view(_inputs: Sequence[Any], copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        if key not in copies:
            copies[key] = result.untyped_storage().clone()
        return _placed(result, copies[key], int(result.storage_offset()))

    return view


def _placed(like: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, offset, like.shape, like.stride())


def _fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a clone has the same strides, and copies no less than the whole memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.storage_offset() == 0
