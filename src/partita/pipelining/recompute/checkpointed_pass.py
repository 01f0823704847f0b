"""A forward pass that keeps nothing of what autograd saves, and runs again when the backward pass needs it.

Autograd's graph of the first run stays as it is, and with it hooks, tied parameters and the split into I and
W. Only the tensors that its nodes save are let go of. Each gets a number; the tensor that a second run saves
under the same number takes its place::

    F   x -> linear -> gelu -> linear -> y          saves 0: x, 1: w, 2: h, ...     keeps x
    B   run again from x                            saves 0: x, 1: w, 2: h, ...     put where they were
        then the backward pass of the first graph

(T. Chen, B. Xu, C. Zhang and C. Guestrin, "Training deep nets with sublinear memory cost", 2016.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from partita._torch.autograd.engine import AsSaved
from partita._torch.tensors.value_hash import same_hash, value_hash
from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.runtime.rng import active_seed

__all__ = ["CheckpointedPass"]


class CheckpointedPass:
    """One pass of a function of which autograd keeps no tensors.

    Args:
        where: what runs, for messages: ``stage 1``.
        on_demand: it runs again by itself as soon as the backward pass asks for a tensor, and lets go of each
            as soon as it has been asked for. Otherwise `run_again` is called before the backward pass, and
            autograd lets go of them as it would have done.
        compare: whether the values that the second run saves are compared with those of the first, on CPUs.
            (Elsewhere an operator may round otherwise each time.)
        device: where it runs.
    """

    def __init__(
        self, where: str, device: torch.device, *, on_demand: bool = False, compare: bool = False
    ) -> None:
        self.where = where
        self.on_demand = on_demand
        self.compare = compare
        self._again: Callable[[], object] | None = None
        self._saved: list[weakref.ref[_Saved]] = []
        self._settings = _Settings(device)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """The first run of the function, in this block."""
        unpack = _OnDemand() if self.on_demand else _Recalled()
        with torch.autograd.graph.saved_tensors_hooks(self._keep_number, unpack):
            yield

    def run_again_by(self, again: Callable[[], object]) -> None:
        """The first run has ended; ``again`` runs the function from the inputs that it had."""
        self._again = again

    @property
    def is_needed(self) -> bool:
        """Whether a backward pass may ask for what was not kept."""
        return any(reference() is not None for reference in self._saved)

    def run_again(self) -> None:
        """Bring back what autograd saved in the first run and still may ask for.

        Raises:
            ExecutionError: the function computes something else than in the first run.
        """
        if self._again is None:
            raise ExecutionError(
                f"{self.where} runs a backward pass inside its forward pass, and is to be recomputed: take "
                "it out of recompute"
            )
        missing = [reference() for reference in self._saved]
        if all(saved is None for saved in missing):
            return
        second = _SecondRun(missing, self.where)
        with self._settings.as_then(), torch.autograd.graph.saved_tensors_hooks(second, _refuse):
            self._again()
        second.check_complete()

    def _keep_number(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self, len(self._saved), tensor)
        self._saved.append(weakref.ref(saved))
        return saved


class _Saved:
    """The place of one tensor that autograd has saved: empty until the function runs again."""

    __slots__ = ("__weakref__", "by", "dtype", "hash", "last", "number", "shape", "tensor", "version")

    def __init__(self, by: CheckpointedPass, number: int, tensor: Tensor) -> None:
        self.by = by
        self.number = number
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.hash = value_hash(tensor) if by.compare else None
        self.tensor: Tensor | None = None
        self.last: weakref.ref[Tensor] | None = None
        self.version = 0

    def fill(self, tensor: Tensor) -> None:
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise _computes_else(
                self.by.where,
                f"the tensor number {self.number} that autograd saves is {list(self.shape)} {self.dtype}, "
                f"and then {list(tensor.shape)} {tensor.dtype}",
            )
        if self.hash is not None and not same_hash(self.hash, value_hash(tensor)):
            raise _computes_else(
                self.by.where,
                f"the tensor number {self.number} that autograd saves, {list(self.shape)} {self.dtype}, has "
                "other values",
            )
        self.tensor = tensor.detach()
        self.version = times_written(self.tensor)

    def recalled(self) -> Tensor:
        tensor = self.tensor
        if tensor is None:
            self.by.run_again()
            tensor = self.tensor
            assert tensor is not None
        if times_written(tensor) != self.version:
            raise ExecutionError(
                f"{self.by.where} writes in place to a tensor ({list(self.shape)}) that its backward pass "
                "needs as it was before: let the model write to a copy (.clone())"
            )
        return tensor


class _Recalled(AsSaved):
    """Autograd's access to what `CheckpointedPass.run_again` has brought back: as cheap as to what it saves
    itself, as often as it likes.
    """

    def __call__(self, saved: Any) -> Tensor:
        tensor: Tensor = saved.recalled()
        return tensor

    def let_go(self, saved: Any) -> None:
        saved.tensor = None


class _OnDemand:
    """Autograd's access to what is computed when it is asked for, and dropped when it has been."""

    def __call__(self, saved: _Saved) -> Tensor:
        # a function may ask twice in a row, and hold what it got
        tensor = None if saved.last is None else saved.last()
        if tensor is None:
            tensor = saved.recalled()
            saved.last = weakref.ref(tensor)
        saved.tensor = None
        return tensor


class _SecondRun:
    """What takes the tensors that the second run saves."""

    def __init__(self, missing: Sequence[_Saved | None], where: str) -> None:
        self._missing = missing
        self._where = where
        self._count = 0

    def __call__(self, tensor: Tensor) -> None:
        number, self._count = self._count, self._count + 1
        if number >= len(self._missing):
            return  # counted, and refused at the end
        saved = self._missing[number]
        if saved is not None:
            saved.fill(tensor)

    def check_complete(self) -> None:
        if self._count != len(self._missing):
            raise _computes_else(
                self._where, f"autograd saves {len(self._missing)} tensors, and then {self._count}"
            )


class _Settings:
    """What a pass depends on besides its inputs: autocast, and torch's generators where no key seeds them."""

    def __init__(self, device: torch.device) -> None:
        self._kinds = tuple(dict.fromkeys(("cpu", device.type)))
        self._autocast = _autocast(self._kinds)
        generators = _generators(device) if active_seed(0) is None else ()
        self._states = [(generator, generator.get_state()) for generator in generators]

    @contextmanager
    def as_then(self) -> Iterator[None]:
        """In this block they are as they were when this was made."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if any(enabled for enabled, _ in (*self._autocast, *_autocast(self._kinds))):
                for kind, (enabled, dtype) in zip(self._kinds, self._autocast, strict=True):
                    # no cache: a weight that is cast here would outlive the pass
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            for generator, state in self._states:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            yield


def _autocast(kinds: Sequence[str]) -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def _generators(device: torch.device) -> tuple[torch.Generator, ...]:
    if device.type != "cuda":
        return (torch.default_generator,)
    number = torch.cuda.current_device() if device.index is None else device.index
    return (torch.default_generator, torch.cuda.default_generators[number])


def _refuse(_: object) -> Tensor:
    raise ExecutionError(
        "a backward pass runs inside a forward pass that is recomputed: take that stage out of recompute"
    )


def _computes_else(where: str, how: str) -> ExecutionError:
    return ExecutionError(
        f"{where} does not compute the same when it is run again ({how}): its forward pass depends on "
        "something that has changed since; take it out of recompute, or let it depend on its arguments and "
        "buffers alone"
    )
