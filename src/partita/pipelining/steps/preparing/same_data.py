"""Whether ranks are given what the rank of the first stage is, in a few of the steps."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from partita._torch.containers.pytree import flatten
from partita.listing import listed
from partita.pipelining.steps.preparing.arguments import StepArguments
from partita.pipelining.steps.preparing.preparation import Accepted, PreparedStep, StepPreparation
from partita.runtime import Comm
from partita.runtime.same_settings import digest

__all__ = ["SameData"]

_MOST_VALUES = 1 << 16
"""So many of each tensor are looked at: ranks that shuffle differently differ in the first sample."""

_TEXT = """\
rank {last} was given another batch than rank {first} in step {step}. The model's arguments count on rank \
{first} and targets on rank {last}, so they may not belong together. Load the same batches on both: a loader \
that shuffles needs one seed, in all epochs: DataLoader(..., shuffle=True, \
generator=torch.Generator().manual_seed(0)) (if the arguments on rank {last} are placeholders, leave them \
out there)"""


_UNUSED = """\
rank {rank} was given {names} in step {step}, and rank {first} was not: keyword arguments of the model \
count on the rank of its first stage alone, and change nothing elsewhere. Give them there, or to all ranks; \
what is for loss_fn goes into loss_kwargs"""


class SameData:
    """A `StepPreparation` that also compares, in the first training step, the second, the fourth, and so on,
    what the ranks were given: one that draws numbers alone shuffles otherwise from the second epoch on.

    The model's arguments count on the first stage's rank and targets on the last one's, so ranks that shuffle
    with seeds of their own would train on mixed pairs. Arguments that are missing, of another layout, or of
    one value all over, as placeholders are, are not compared. A keyword argument that the first stage's rank
    was not given has no effect.

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
        self._step = 0
        self._warned: set[str] = set()
        self._arguments: StepArguments | None = None

    def accept(self, arguments: StepArguments) -> Accepted:
        """See `StepPreparation`."""
        self._arguments = arguments if arguments.train and self._comm.size > 1 else None
        return self._preparation.accept(arguments)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`."""
        arguments, self._arguments = self._arguments, None
        if arguments is not None:
            self._step += 1
            if self._step.bit_count() == 1:
                self._compare(arguments)
        return self._preparation.prepare(accepted)

    def _compare(self, arguments: StepArguments) -> None:
        rank, first, last = self._comm.rank, self._first, self._last
        compared = first != last and rank in (first, last)
        batch = self._fingerprint(arguments) if compared else (0, 0)
        everywhere = self._comm.all_gather_object((batch, self._names(arguments)))
        (layout, values), names = everywhere[first]
        if rank == last and layout and layout == batch[0] and values != batch[1]:
            self._warn(_TEXT, last=last)
        unused = [name for name in everywhere[rank][1] if name not in names]
        if unused:
            self._warn(_UNUSED, rank=rank, names=listed(unused))

    def _warn(self, text: str, **about: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            message = text.format(**about, first=self._first, step=self._step)
            warnings.warn(message, UserWarning, stacklevel=10)

    def _names(self, arguments: StepArguments) -> list[str]:
        """Of the keyword arguments that count on the first stage's rank alone."""
        named = [arguments.kwargs, *(arguments.kwarg_mbs or ())] if self._named else []
        return sorted({name for keywords in named for name, value in keywords.items() if value is not None})

    def _fingerprint(self, arguments: StepArguments) -> tuple[int, int]:
        """Two numbers: of dtypes and shapes, 0 where there is nothing to compare; and of the values."""
        positional = arguments.args, arguments.arg_mbs
        named = (dict(arguments.kwargs), arguments.kwarg_mbs) if self._named else ()
        tensors = [leaf for leaf in flatten((positional, named))[0] if _is_ordinary(leaf)]
        values = [_first_bytes(tensor) for tensor in tensors]
        if all(bool((rows == rows[:1]).all()) for rows in values):
            return 0, 0
        layout = "|".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        content = b"|".join(rows.numpy().tobytes() for rows in values)
        return digest(layout) or 1, digest(content)


def _is_ordinary(leaf: Any) -> bool:
    if type(leaf) not in (Tensor, Parameter) or leaf.is_meta or leaf.is_quantized:
        return False
    return bool(leaf.layout == torch.strided)


def _first_bytes(tensor: Tensor) -> Tensor:
    """The first values, one a row: whatever the dtype, bytes can be compared."""
    values = tensor.detach().reshape(-1)[:_MOST_VALUES].cpu()
    values = values.resolve_conj().resolve_neg().contiguous()
    return values.view(torch.uint8).reshape(-1, tensor.element_size())
