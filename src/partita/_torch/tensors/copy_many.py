"""Many copies in few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["copy_many"]


def copy_many(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, as ``copy_`` does. On a GPU it is one launch for many tensors where all
    are of one dtype, and each has the strides of its target.

    >>> targets = [torch.zeros(2), torch.zeros(1)]
    >>> copy_many(targets, [torch.ones(2), torch.tensor([3.0])])
    >>> targets
    [tensor([1., 1.]), tensor([3.])]
    """
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(list(targets), list(sources))
