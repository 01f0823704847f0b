"""What a model was cut with: one microbatch's arguments, by their structure and sizes.

A list of tensors may have an entry for each sample, or be a group of values that each have the whole batch.
The example says which: of samples, a step would be given more than a microbatch has, and of values as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor

from partita._torch.containers.pytree import TreeSpec, flatten
from partita._torch.export.signature import Signature
from partita.errors import ArgumentError
from partita.runtime.sample_lists import first_sizes

__all__ = ["ExampleArguments"]


@dataclass(frozen=True)
class ExampleArguments:
    """Of one microbatch.

    Attributes:
        samples: how many it has; None where that can't be said.
        signature: of a graph, which takes lists of these lengths only; None where the model's own code runs,
            which takes any.
    """

    samples: int | None
    signature: Signature | None
    _structure: TreeSpec
    _shapes: tuple[Size | None, ...]

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any] | None, signature: Signature | None = None
    ) -> ExampleArguments:
        """Describe the arguments."""
        own = (tuple(args), dict(kwargs or {}))
        outside, within = first_sizes(dict(enumerate(own[0])) | own[1])
        sizes = outside - {1} or outside or within
        structure, shapes = _described(own)
        return cls(next(iter(sizes)) if len(sizes) == 1 else None, signature, structure, shapes)

    def has_lists_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a microbatch that has been cut along its tensors has the lists that the example has: where
        code runs, of tensors of the same shapes.

        >>> import torch
        >>> example = ExampleArguments.of(([torch.zeros(2, 3)] * 2,), {})
        >>> [example.has_lists_of(([torch.zeros(rows, 3)] * 2,), {}) for rows in (1, 2)]
        [False, True]
        """
        if self.signature is None:
            return _described((args, dict(kwargs))) == (self._structure, self._shapes)
        try:
            self.signature.flatten(args, kwargs)
        except ArgumentError:  # which whoever runs the graph raises again
            return False
        return True


def _described(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[TreeSpec, tuple[Size | None, ...]]:
    leaves, structure = flatten(arguments)
    return structure, tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves)
