"""A stage's share of a tied parameter's gradient, apart from what is in ``.grad`` already.

The first stage that holds the parameter owns the sum: the shares travel to it from holder to holder, and only
there are they added to ``.grad``, and hooks run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from partita._torch.autograd.engine import hooks_paused
from partita.pipelining.interface.routes import Tied

__all__ = ["TiedShare", "kept_apart"]


class TiedShare:
    """One stage's share in one tied parameter.

    Attributes:
        name: of the gradient, as it travels.
        parameter: this stage's copy.
        owned: whether the sum is taken here.
    """

    def __init__(self, group: Tied, parameter: nn.Parameter, stage: int) -> None:
        self.name = group.value.name
        self.parameter = parameter
        self.owned = group.stages[0] == stage


@contextmanager
def kept_apart(shares: Sequence[TiedShare], *, replicated: bool) -> Iterator[dict[str, Tensor | None]]:
    """Run a backward pass that neither changes ``.grad`` of parameters that another stage owns nor runs their
    hooks. When the block ends, the dict has their shares by name.

    Args:
        replicated: the stage is in ``DistributedDataParallel``, which may replace a ``.grad`` by the mean
            over the replicas; the owner needs this replica's share.
    """
    others = [share for share in shares if not share.owned]
    gradients: dict[str, Tensor | None] = {}
    with hooks_paused([share.parameter for share in others]):
        before = [share.parameter.grad for share in others]
        for share in others:
            share.parameter.grad = None
        watches = [
            share.parameter.register_hook(partial(gradients.__setitem__, share.name))
            for share in others
            if replicated
        ]
        try:
            yield gradients
        finally:
            for watch in watches:
                watch.remove()
            for share, gradient in zip(others, before, strict=True):
                gradients.setdefault(share.name, None if replicated else share.parameter.grad)
                share.parameter.grad = gradient
