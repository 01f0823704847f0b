"""Runs a function so that it can run again as it ran: from the inputs, buffers and attributes that it had.

What the function writes to is copied before each run. Which tensors these are is seen in its first run,
before which all inputs and buffers are copied; from then on only those. A graph that writes in one branch on
data only may write in any later run: then all are copied before each, and its buffers kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from partita._torch.containers.pytree import TreeSpec, flatten, unflatten
from partita._torch.tensors.storage import storage_key
from partita._torch.tensors.value_hash import same_hash, value_hash
from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.pipelining.interface.layout import copied
from partita.pipelining.interface.two_modes import TwoModes, writes_in_a_branch
from partita.pipelining.recompute.checkpointed_pass import CheckpointedPass
from partita.pipelining.recompute.module_state import ModuleState
from partita.runtime.host_generators import generator_states, set_generators

__all__ = ["Checkpointing"]


class Checkpointing:
    """Makes checkpointed passes of one function.

    Args:
        where: what runs, for messages: ``stage 1``.
        module: what it runs; None where all that it reads are its arguments.
        on_demand: see `CheckpointedPass`.
        written: the positions of the arguments that it writes to, where that is known, and of those that
            others write to between two runs.
    """

    def __init__(
        self,
        where: str,
        module: nn.Module | None = None,
        *,
        on_demand: bool = False,
        written: Collection[int] | None = None,
    ) -> None:
        self._where = where
        self._module = module
        self._on_demand = on_demand
        self._written: dict[tuple[bool, ...], frozenset[str]] = {}
        if written is not None:
            self._written[()] = frozenset(map(_argument, written))

    def run(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        again: Callable[..., object],
        device: torch.device,
    ) -> tuple[Any, CheckpointedPass | None]:
        """Call ``call`` with these arguments.

        Args:
            again: does the same; called with arguments like these in the backward pass.
            device: where it runs.

        Returns:
            What it returns, and the pass; None where no backward pass needs it.

        Raises:
            ExecutionError: it writes to a tensor that it did not write to in the first run, or changes what
                can't be put back.
        """
        # What it starts from.
        leaves, structure = flatten((args, dict(kwargs)))
        state = None if self._module is None else ModuleState(self._module)
        inputs = {_argument(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        tensors = inputs if state is None else {**state.tensors, **inputs}
        modes = () if self._module is None else tuple(child.training for child in self._module.modules())
        written = self._written.get(modes)
        copies = _Copies(
            {
                name: tensor
                for name, tensor in tensors.items()
                if (not isinstance(tensor, nn.Parameter) if written is None else name in written)
            }
        )
        before = {name: times_written(tensor) for name, tensor in tensors.items()}
        # the user's code may write through .data, which torch does not count
        uncopied = tensors.keys() - copies.names if self.runs_python else ()
        hashes = {name: value_hash(tensors[name]) for name in uncopied}
        host = generator_states() if self.runs_python else None
        # The first run.
        checkpointed = CheckpointedPass(
            self._where, device, on_demand=self._on_demand, compare=self.runs_python
        )
        with checkpointed.recorded():
            result = call(*args, **kwargs)
        # What it has written to.
        after = {name: times_written(tensor) for name, tensor in tensors.items()}
        changed = {name for name, times in after.items() if times != before[name]}
        changed |= {name for name, was in hashes.items() if not same_hash(was, value_hash(tensors[name]))}
        if state is not None:
            state.check_objects(self._where)
        if written is None:
            # a normalisation writes statistics, and torch does not count that
            changed |= copies.different(tensors)
            written = frozenset(changed)
            if self._module is not None and writes_in_a_branch(self._module):
                written |= copies.names - inputs.keys()
            else:
                self._written[modes] = written
        unforeseen = changed - copies.names
        if unforeseen:
            name = sorted(unforeseen)[0]
            if isinstance(tensors[name], nn.Parameter):
                raise ExecutionError(
                    f"{self._where} writes to its parameter {name} in its forward pass, and none is put back "
                    f"to run it again: make it a buffer, or take {self._where} out of recompute"
                )
            raise ExecutionError(
                f"{self._where} writes to {name} in this forward pass and did not in its first one, so that "
                f"its value of before is lost: write to it in each pass, or take {self._where} out of "
                "recompute"
            )
        if not checkpointed.is_needed:
            return result, None
        copies.keep_only(written)
        start = _Start(
            self._where,
            tuple(_Kept.of(leaf) for leaf in leaves),
            structure,
            state,
            {
                name: (tensor.detach(), after[name])
                for name, tensor in tensors.items()
                if name not in copies.names
            },
            copies,
            host,
        )
        checkpointed.run_again_by(lambda: start.run(again))
        return result, checkpointed

    @property
    def runs_python(self) -> bool:
        """Whether it is the user's code, which may draw Python's numbers and change what is not seen."""
        return self._module is not None and not isinstance(self._module, (GraphModule, TwoModes))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A leaf of the arguments; a tensor is kept without its history."""

    value: Any
    requires_grad: bool

    @classmethod
    def of(cls, leaf: Any) -> _Kept:
        if isinstance(leaf, Tensor):
            return cls(leaf.detach(), leaf.requires_grad)
        return cls(leaf, False)

    def again(self, copy: Tensor | None) -> Any:
        """What the function is called with.

        Args:
            copy: of what the tensor was before the function wrote to it; None where it does not.
        """
        if not isinstance(self.value, Tensor):
            return self.value
        if copy is None:
            return self.value.detach().requires_grad_(self.requires_grad)
        copy = copy.detach().requires_grad_(self.requires_grad)
        return copied(copy) if self.requires_grad else copy  # autograd lets nobody write to a leaf


@dataclass(frozen=True, slots=True, eq=False)
class _Start:
    """What a function runs again from.

    Attributes:
        unwritten: the tensors that it does not write to, each with how often others had written to it.
        copies: of the others.
        host: the states of Python's and numpy's generators, where they matter.
    """

    where: str
    leaves: Sequence[_Kept]
    structure: TreeSpec
    state: ModuleState | None
    unwritten: Mapping[str, tuple[Tensor, int]]
    copies: _Copies
    host: Any

    def run(self, again: Callable[..., object]) -> None:
        for name, (tensor, times) in self.unwritten.items():
            if times_written(tensor) != times:
                raise ExecutionError(
                    f"somebody has written to {name} between the forward and the backward pass of "
                    f"{self.where}, which needs it as it was to run again: let nobody else write to it, or "
                    f"take {self.where} out of recompute"
                )
        copies = self.copies.fresh()
        leaves = [leaf.again(copies.get(_argument(place))) for place, leaf in enumerate(self.leaves)]
        args, kwargs = unflatten(leaves, self.structure)
        present = None if self.host is None else generator_states()
        if self.host is not None:
            set_generators(self.host)
        try:
            if self.state is None:
                again(*args, **kwargs)
            else:
                tensors = self.state.tensors
                instead = {id(tensors[name]): copy for name, copy in copies.items() if name in tensors}
                with self.state.restored(instead):
                    again(*args, **kwargs)
        finally:
            if present is not None:
                set_generators(present)


class _Copies:
    """Copies of tensors, by name; they share memory where the tensors do. The tensors are not kept."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._memory: dict[int, Any] = {}
        self._places: dict[str, _Place] = {}
        for name, tensor in tensors.items():
            place = self._places[name] = _Place.of(tensor)
            if place.memory not in self._memory:
                self._memory[place.memory] = _memory(tensor).clone()

    @property
    def names(self) -> frozenset[str]:
        """Which tensors were copied."""
        return frozenset(self._places)

    def different(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """The names of tensors that are no longer as they were when they were copied."""
        changed = {
            place.memory: not _same_bytes(_memory(tensors[name]), self._memory[place.memory])
            for name, place in self._places.items()
        }
        return {name for name, place in self._places.items() if changed[place.memory]}

    def keep_only(self, names: Collection[str]) -> None:
        """Let go of the other copies."""
        self._places = {name: place for name, place in self._places.items() if name in names}
        keys = {place.memory for place in self._places.values()}
        self._memory = {key: memory for key, memory in self._memory.items() if key in keys}

    def fresh(self) -> dict[str, Tensor]:
        """Copies of the copies, to be written to."""
        memory = {key: value.clone() for key, value in self._memory.items()}
        return {name: place.filled(memory[place.memory]) for name, place in self._places.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: the key of its storage, and how it lies in it."""

    memory: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    trained: bool | None

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        trained = tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
        if not _is_dense(tensor):
            return cls(id(tensor), tensor.dtype, 0, (), (), trained)
        offset = int(tensor.storage_offset())
        return cls(
            storage_key(tensor), tensor.dtype, offset, tuple(tensor.size()), tuple(tensor.stride()), trained
        )

    def filled(self, memory: Any) -> Tensor:
        """A tensor that lies there in a copy of the memory."""
        if isinstance(memory, Tensor):
            return memory
        result = torch.empty(0, dtype=self.dtype, device=memory.device)
        result.set_(memory, self.offset, self.size, self.stride)
        return result if self.trained is None else nn.Parameter(result, self.trained)


def _memory(tensor: Tensor) -> Any:
    """All of the memory that a tensor lies in, or the tensor where it has none of its own."""
    return tensor.untyped_storage() if _is_dense(tensor) else tensor.detach()


def _same_bytes(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    of_bytes = (
        torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory) for memory in (left, right)
    )
    return torch.equal(*of_bytes)


def _is_dense(tensor: Tensor) -> bool:
    """Whether it is a view of numbers in a storage, and nothing more."""
    is_own_kind = type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, nn.Buffer)
    return is_own_kind and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def _argument(place: int) -> str:
    return f"argument {place}"
