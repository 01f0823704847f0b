"""Plain data comes back; what would run code is refused on both ways."""

from __future__ import annotations

from collections import OrderedDict
from io import BytesIO
from typing import Any

import pytest
import torch

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.files.plain_values import check_plain, plain_bytes, plain_value


@pytest.mark.parametrize(
    "value",
    [1, 2.5, "text", b"bytes", None, (1, (2, "x")), [1, {"a": [True]}], OrderedDict(a=1), 1j, torch.float16],
    ids=repr,
)
def test_plain_data_comes_back(value: Any) -> None:
    check_plain(value, "it")
    loaded = plain_value(BytesIO(plain_bytes(value, "it", allow_pickle=False)), "it", allow_pickle=False)
    assert loaded == value
    assert type(loaded) is type(value)


def test_what_would_run_code_is_refused_unless_trusted() -> None:
    value = [slice(1, 2), len]
    with pytest.raises(CheckpointError, match=r"it is a list, which can't be saved as plain data \(numbers"):
        check_plain(value, "it")
    text = plain_bytes(value, "it", allow_pickle=True)
    with pytest.raises(CheckpointError, match="it is damaged, or no plain data"):
        plain_value(BytesIO(text), "it", allow_pickle=False)
    assert plain_value(BytesIO(text), "it", allow_pickle=True) == value


def test_what_can_not_be_pickled_at_all_is_told() -> None:
    with pytest.raises(
        CheckpointError, match=r"it is a function, which can't be saved \(.*: give plain values"
    ):
        plain_bytes(lambda: 0, "it", allow_pickle=True)
