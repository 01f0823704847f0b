"""Specs: how an argument is cut into microbatches, and how their results are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from partita._torch.containers.pytree import flatten_up_to
from partita.errors import MicrobatchError

__all__ = ["Reduce", "Replicate", "Spec", "TensorChunkSpec", "WeightedMean", "match_specs"]


@dataclass(frozen=True)
class TensorChunkSpec:
    """Cut this argument along `split_dim` (negative: from the end), whatever size the others have;
    concatenate this result along it.
    """

    split_dim: int = 0

    @property
    def dim(self) -> int:
        """Another name of `split_dim`."""
        return self.split_dim

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """Return one spec for each positional argument."""
        return tuple(TensorChunkSpec(dim) for dim in chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: Mapping[str, int]) -> dict[str, TensorChunkSpec]:
        """Return one spec for each keyword argument."""
        return {name: TensorChunkSpec(dim) for name, dim in chunk_dims.items()}


@dataclass(frozen=True)
class Replicate:
    """Give this argument whole to every microbatch; this result must be equal in all of them."""


@dataclass(frozen=True)
class Reduce:
    """Fold the microbatches' values of this result: ``fn(fn(init, first), second)`` and so on.

    >>> import torch
    >>> from partita.runtime import merge
    >>> merge([torch.tensor(1.0), torch.tensor(2.0)], Reduce(torch.add, torch.tensor(0.0)))
    tensor(3.)
    """

    fn: Callable[[Any, Any], Any]
    init: Any


@dataclass(frozen=True)
class WeightedMean:
    """Average the microbatches' values of this result with these weights, which are
    ``MicrobatchPlan.weights`` as a rule.
    """

    weights: tuple[float, ...]


Spec: TypeAlias = TensorChunkSpec | Replicate | Reduce | WeightedMean


def match_specs(specs: Any, tree: Any, name: str) -> list[Any]:
    """Return the spec, or None, of each leaf of ``tree``.

    Args:
        specs: of the structure of ``tree``; one, or None, holds for a whole subtree.
        name: what messages call them.

    Raises:
        MicrobatchError: another structure.
    """
    try:
        return flatten_up_to(specs, tree, lambda value: value is None or isinstance(value, Spec))
    except ValueError as error:
        raise MicrobatchError(f"{name} does not have the structure of what it describes: {error}") from error
