"""Numbers for the tensors that a pass meets. Every stage takes the same way, so the numbers agree on all."""

from __future__ import annotations

import weakref

from torch import Tensor

from partita.pipelining.blocks.cut import Site

__all__ = ["NumberedTensors"]


class NumberedTensors:
    """Tensors by the order in which a pass first meets them. None of them is kept alive.

    Attributes:
        references: to each tensor, by number.
        sites: where each tensor was made, by number.
        ghosts: the numbers of tensors whose values are not on this stage.
        state: the numbers of parameters, buffers and other attributes of modules.
        by_identity: the number last given to an ``id()``; see `number_of`.
    """

    def __init__(self) -> None:
        self.references: list[weakref.ref[Tensor]] = []
        self.sites: list[Site] = []
        self.ghosts: set[int] = set()
        self.state: set[int] = set()
        self.by_identity: dict[int, int] = {}

    def __getitem__(self, number: int) -> Tensor | None:
        return self.references[number]()

    def number_of(self, tensor: Tensor) -> int | None:
        """Return its number; None where this very object is new, whatever had its ``id()`` before."""
        number = self.by_identity.get(id(tensor))
        return number if number is not None and self.references[number]() is tensor else None

    def add(self, tensor: Tensor, site: Site, *, ghost: bool) -> int:
        """Give a new tensor the next number."""
        number = len(self.references)
        self.references.append(weakref.ref(tensor))
        self.sites.append(site)
        self.by_identity[id(tensor)] = number
        if ghost:
            self.ghosts.add(number)
        return number
