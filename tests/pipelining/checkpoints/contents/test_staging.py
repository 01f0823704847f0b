"""Copies of what a snapshot writes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from tests.pipelining.running import assert_equal

from partita.pipelining.checkpoints.contents.staging import SnapshotBuffers


def _changing(count: int) -> tuple[Any, ...]:
    return torch.full((2,), count), [count]


@pytest.mark.parametrize(
    "around",
    [list, tuple, lambda parts: {"a": parts}, lambda parts: OrderedDict(a=parts), lambda parts: {0: parts}],
)
def test_what_changes_in_place_afterwards_is_copied(around: Any) -> None:
    """A list that holds tensors was written as it was when the writer came to it, not when it was taken."""
    tensor, numbers = _changing(1)
    copied = SnapshotBuffers().of({"model": {"x._extra_state": around([tensor, numbers])}})
    tensor.add_(1)
    numbers.append(5)
    assert_equal(copied["model"]["x._extra_state"], around([*_changing(1)]))
