"""The gradients that a backward pass brings to its leaves, as they lie there.

``.grad`` is not the place to read them from: autograd keeps a gradient in it only where it lies like its
tensor, and a copy that does otherwise. In the uncut model the tensor of a border is no leaf, and its gradient
goes on as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from partita._torch.autograd.engine import watch_gradient
from partita.pipelining.interface.layout import lies_plainly

__all__ = ["Arrivals"]


class Arrivals:
    """Made before the pass, asked afterwards.

    Args:
        leaves: tensors without history of which each wants a gradient.
    """

    __slots__ = ("_leaves", "_odd")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._odd: dict[int, Tensor] = {}
        for number, leaf in enumerate(leaves):
            watch_gradient(leaf, partial(_keep_odd, self._odd, number, lies_plainly(leaf)))

    def gradients(self) -> list[Tensor | None]:
        """Of each leaf; None where nothing has come."""
        odd = self._odd
        return [odd.get(number, leaf.grad) for number, leaf in enumerate(self._leaves)]


def _keep_odd(odd: dict[int, Tensor], number: int, leaf_is_plain: bool, gradient: Tensor) -> None:
    """Only those that ``.grad`` may not have: another reference to the others would make autograd copy
    them.
    """
    if not (leaf_is_plain and lies_plainly(gradient)):
        odd[number] = gradient
