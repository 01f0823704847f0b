"""Whether the ranks of the first and of the last stage were given the same batch, in the first step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from partita._torch.containers.pytree import flatten
from partita.pipelining.steps.preparing.arguments import StepArguments
from partita.pipelining.steps.preparing.preparation import Accepted, PreparedStep, StepPreparation
from partita.runtime import Comm, wait_all
from partita.runtime.same_settings import digest

__all__ = ["SameData"]

_TAG = 0
_MOST_VALUES = 1 << 16
"""So many of each tensor are looked at: ranks that shuffle differently differ in the first sample."""

_TEXT = """\
rank {last} was given another batch than rank {first} in the first step. The model's arguments count on rank \
{first} and targets on rank {last}, so they may not belong together. Load the same batches on both: a loader \
that shuffles needs one seed: DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0)) \
(if the arguments on rank {last} are placeholders, leave them out there)"""


class SameData:
    """A `StepPreparation` that also compares, in the first training step, what the two ranks were given: the
    model's arguments count on the one and targets on the other, so ranks that shuffle with seeds of their own
    would train on mixed pairs.

    ::

        first stage's rank   layout, values -->  last stage's rank: same layout, other values? warn

    One message, once. Arguments that are missing, of another layout, or of one value all over, as
    placeholders are, are not compared.

    Args:
        preparation: what else prepares a step.
        named: whether keyword arguments count on the first stage's rank alone.
    """

    def __init__(
        self, preparation: StepPreparation, comm: Comm, stage_ranks: tuple[int, ...], *, named: bool
    ) -> None:
        self._preparation = preparation
        self._comm = comm
        self._first, self._last = stage_ranks[0], stage_ranks[-1]
        self._named = named
        self._is_over = self._first == self._last
        self._arguments: StepArguments | None = None

    def accept(self, arguments: StepArguments) -> Accepted:
        """See `StepPreparation`."""
        self._arguments = arguments if arguments.train and not self._is_over else None
        return self._preparation.accept(arguments)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`."""
        arguments, self._arguments = self._arguments, None
        if arguments is not None:
            self._is_over = True
            self._compare(arguments)
        return self._preparation.prepare(accepted)

    def _compare(self, arguments: StepArguments) -> None:
        comm = self._comm
        if comm.rank == self._first:
            wait_all([comm.send(self._fingerprint(arguments), self._last, _TAG)])
        elif comm.rank == self._last:
            theirs = torch.empty(2, dtype=torch.int64)
            wait_all([comm.recv(theirs, self._first, _TAG)])
            (layout, values), (own_layout, own_values) = (
                theirs.tolist(),
                self._fingerprint(arguments).tolist(),
            )
            if layout and layout == own_layout and values != own_values:
                warnings.warn(_TEXT.format(first=self._first, last=self._last), UserWarning, stacklevel=9)

    def _fingerprint(self, arguments: StepArguments) -> Tensor:
        """Two numbers: of dtypes and shapes, 0 where there is nothing to compare; and of the values."""
        positional = arguments.args, arguments.arg_mbs
        named = (dict(arguments.kwargs), arguments.kwarg_mbs) if self._named else ()
        tensors = [leaf for leaf in flatten((positional, named))[0] if _is_ordinary(leaf)]
        values = [_first_bytes(tensor) for tensor in tensors]
        if all(bool((rows == rows[:1]).all()) for rows in values):
            return torch.zeros(2, dtype=torch.int64)
        layout = "|".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        content = b"|".join(rows.numpy().tobytes() for rows in values)
        return torch.tensor([digest(layout) or 1, digest(content)])


def _is_ordinary(leaf: Any) -> bool:
    if type(leaf) not in (Tensor, Parameter) or leaf.is_meta or leaf.is_quantized:
        return False
    return bool(leaf.layout == torch.strided)


def _first_bytes(tensor: Tensor) -> Tensor:
    """The first values, one a row: whatever the dtype, bytes can be compared."""
    values = tensor.detach().reshape(-1)[:_MOST_VALUES].cpu()
    values = values.resolve_conj().resolve_neg().contiguous()
    return values.view(torch.uint8).reshape(-1, tensor.element_size())
