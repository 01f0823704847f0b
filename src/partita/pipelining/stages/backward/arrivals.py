"""The gradients that a backward pass brings to its leaves, in the layout in which they arrive.

They can't be read from ``.grad``, where autograd puts a copy of a gradient whose layout is not its tensor's.
In the uncut model the tensor at a border is no leaf, and its gradient goes on in the layout that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import setitem

from torch import Tensor

from partita._torch.autograd.engine import watch_gradient
from partita.pipelining.interface.layout import is_compact

__all__ = ["Arrivals"]


class Arrivals:
    """Collects gradients; made before the backward pass, and asked after it.

    Args:
        leaves: tensors without history of which each wants a gradient.
    """

    __slots__ = ("_leaves", "_other_layout")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._other_layout: dict[int, Tensor | None] = {}
        for number, leaf in enumerate(leaves):
            keep = _keep_other_layout if is_compact(leaf) else setitem
            watch_gradient(leaf, partial(keep, self._other_layout, number))

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each leaf; None where none arrived."""
        other_layout = self._other_layout
        if not other_layout:
            return [leaf.grad for leaf in self._leaves]
        return [other_layout.get(number, leaf.grad) for number, leaf in enumerate(self._leaves)]


def _keep_other_layout(gradients: dict[int, Tensor | None], number: int, gradient: Tensor | None) -> None:
    """Keep only what ``.grad`` may not have as it is: a reference to another would make autograd copy it."""
    if gradient is not None and not is_compact(gradient):
        gradients[number] = gradient
