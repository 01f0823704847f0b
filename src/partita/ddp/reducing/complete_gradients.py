"""Which offers of compiled graphs are the whole gradient: learnt in passes that do not take them."""

from __future__ import annotations

from collections.abc import Collection

import torch

__all__ = ["CompleteGradients", "can_be_added"]


class CompleteGradients:
    """Compares what compiled graphs have offered of a gradient with what autograd made of it.

    Args:
        count: how many parameters there are.
        late: indices of those that other code uses too; they are never trusted.
    """

    def __init__(self, count: int, late: Collection[int]) -> None:
        self._whole = [False] * count
        self._late = frozenset(late)
        self._offered: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> bool:
        """Whether offers were the whole gradient of the parameter when that was last seen."""
        return self._whole[index]

    def note_offer(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient goes on to autograd, which finds no other in ``grad``."""
        before = self._offered.get(index)
        self._offered[index] = gradient if before is None else before + gradient

    def compare(self, index: int, gradient: torch.Tensor | None, *, foreseen: bool) -> None:
        """Autograd is done with a parameter, and ``gradient`` is in its ``grad``.

        Args:
            foreseen: there were as many offers as were counted when the pass began.
        """
        offered = self._offered.pop(index, None)
        if gradient is not None and offered is not None and index not in self._late:
            self._whole[index] = foreseen and torch.equal(gradient, offered)

    def pass_ends(self) -> None:
        """What was offered in this pass is of no more use."""
        self._offered.clear()


def can_be_added(gradient: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Whether adding ``gradient`` to ``parameter.grad`` is what it looks like."""
    if torch.is_grad_enabled():
        return False
    existing = parameter.grad
    if existing is not None and (existing.layout is not torch.strided or existing.dtype != parameter.dtype):
        return False
    return gradient is None or (
        gradient.layout is torch.strided
        and gradient.shape == parameter.shape
        and gradient.dtype == parameter.dtype
        and gradient.device == parameter.device
    )
