"""Copies and pickles of a stage that talks to other ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

import torch.distributed as dist

from partita.errors import ArgumentTypeError
from partita.runtime import Comm

__all__ = ["CopiedInItsProcess"]


class CopiedInItsProcess:
    """A copy talks to the same ranks through the same comm or group; a pickle could not, and is refused.

    Attributes:
        index: which stage it is.
        comm: see `Stage`.
        group: likewise.
    """

    index: int
    comm: Comm | None
    group: dist.ProcessGroup | None

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = object.__new__(type(self))
        memo |= {id(shared): shared for shared in (self.comm, self.group)}
        vars(twin).update(deepcopy(vars(self), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self.comm is None and self.group is None:
            return vars(self)
        name = "group" if self.comm is None else "comm"
        raise ArgumentTypeError(
            f"stage {self.index} can't be pickled with its {name}, which connects this process with others: "
            f"set stage.{name} = None before, and give it one where it is loaded; or save_checkpoint() saves "
            "weights and optimizer"
        )
