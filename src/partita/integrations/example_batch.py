"""What a loader's batches look like: an example, and the sizes that differ between batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import Dim
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["example_batches", "open_sizes"]

_SAMPLES = 16
"""As many are read to see whether their sizes differ."""


def example_batches(loader: DataLoader[Any], size: int) -> list[Any]:
    """Return a batch of the first ``size`` samples, and batches of one from all over the dataset, twice.

    Of one only, since a batch is as long as its longest sample; twice, since some collators want several.

    >>> loader = DataLoader(range(100), batch_size=4)
    >>> [batch.tolist() for batch in example_batches(loader, 3)][:3]
    [[0, 1, 2], [0, 0], [6, 6]]
    """
    data: Any = loader.dataset
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        first = list(itertools.islice(iter(data), max(size, _SAMPLES)))
        first, others = first[:size], first
    else:
        length = len(data)
        first = [data[number] for number in range(min(size, length))]
        others = [data[number] for number in range(0, length, max(1, length // _SAMPLES))][:_SAMPLES]
    return [loader.collate_fn(samples) for samples in (first, *([sample] * 2 for sample in others))]


def open_sizes(batches: Sequence[Any]) -> dict[str, dict[int, Any]] | None:
    """Return which sizes stay open, as ``dynamic_shapes`` has it; None where only numbers of samples differ.

    Args:
        batches: tensors by name.

    >>> import torch
    >>> open_sizes([{"ids": torch.ones(3, 7)}, {"ids": torch.ones(2, 7)}]) is None
    True
    >>> sizes = open_sizes([{"ids": torch.ones(3, 7)}, {"ids": torch.ones(2, 9)}])
    >>> [(name, list(dims)) for name, dims in sizes.items()]
    [('ids', [0, 1])]
    """
    if not all(isinstance(batch, Mapping) for batch in batches):
        return None
    differs = False
    result: dict[str, dict[int, Any]] = {}
    for name, value in batches[0].items():
        if not isinstance(value, Tensor) or not value.dim():
            continue
        shapes = {tuple(batch[name].shape) for batch in batches if isinstance(batch.get(name), Tensor)}
        if len({len(shape) for shape in shapes}) != 1:
            continue
        unlike = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if dim and len(set(sizes)) > 1]
        differs = differs or bool(unlike)
        result[name] = dict.fromkeys([0, *unlike], Dim.AUTO)
    return result if differs else None
