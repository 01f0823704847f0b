"""What is seen of a loader's batches before training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from partita.integrations.example_batch import example_batches, open_sizes


def _longest(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"ids": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.ones(3 + number % 4) for number in range(40))


def test_lengths_that_differ_only_further_on_stay_open() -> None:
    rows = [torch.ones(3)] * 50 + [torch.ones(5)] * 50
    batches = example_batches(DataLoader(rows, collate_fn=_longest), 4)  # type: ignore[arg-type]
    assert batches[0]["ids"].shape == (4, 3)
    sizes = open_sizes(batches)
    assert sizes is not None
    assert list(sizes["ids"]) == [0, 1]


def test_a_stream_has_no_length_and_gives_its_first_samples() -> None:
    """It was asked for its length: every Dataset of torch has a ``__getitem__``, streams too."""
    batches = example_batches(DataLoader(_Stream(), collate_fn=_longest), 2)
    assert batches[0]["ids"].shape == (2, 4)
    assert open_sizes(batches) is not None


def test_what_is_no_tensor_and_equal_lengths_leave_nothing_open() -> None:
    assert open_sizes([{"a": 3, "b": torch.ones(2, 4)}, {"a": 4, "b": torch.ones(3, 4)}]) is None
    assert open_sizes([torch.ones(2, 3)]) is None
