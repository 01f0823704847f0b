"""A block in which nothing is computed from a ghost and a tensor that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partita._torch.fake.ghosts import is_ghostly
from partita._torch.tensors.storage import storage_key
from partita.errors import CheckpointError

__all__ = ["ghosts_kept_apart"]


class ghosts_kept_apart(TorchDispatchMode):  # noqa: N801 - a block, as a function would make one
    """In this block a CheckpointError is raised where a ghost meets one of these tensors, or what was
    computed from them: the result would be a ghost, as if all of it were elsewhere.

    >>> ghost = Tensor([1.0, 2.0]).to("meta")
    >>> with ghosts_kept_apart([]):
    ...     (ghost + 1).shape
    torch.Size([2])
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._there = list(tensors)
        self._storages = set(map(storage_key, self._there))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Of each operation that torch runs."""
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [storage_key(tensor) in self._storages for tensor in taken]
        if not any(there):
            return func(*args, **kwargs or {})
        if any(is_ghostly(tensor) and not here for tensor, here in zip(taken, there, strict=True)):
            # Before it runs: some operations refuse the two themselves, in torch's words of devices.
            raise CheckpointError(f"{func} takes a tensor of this stage and one of another")
        result = func(*args, **kwargs or {})
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._there += results  # alive, so that no other gets their storages' numbers
        self._storages.update(map(storage_key, results))
        return result
