"""One rank's value on all ranks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from partita.errors import ExecutionError
from partita.integrations.broadcast_value import broadcast_value
from partita.runtime import Comm, InProcessWorld


@dataclass
class Kept:
    tensors: list[torch.Tensor]
    name: str


def _value() -> dict[str, Any]:
    shared = torch.arange(6).reshape(2, 3)
    kept = Kept(
        [shared, shared.T, torch.empty(0), torch.tensor(True), torch.ones(2, dtype=torch.bfloat16)], "it"
    )
    return OrderedDict(kept=kept, shared=shared, plain=[1, None, "text"])


def test_objects_and_tensors_in_them_come_as_they_are() -> None:
    def run(comm: Comm) -> Any:
        return broadcast_value(comm, _value() if comm.rank == 2 else "ignored", 2, torch.device("cpu"))

    expected = _value()
    for value in InProcessWorld(3).run(run):
        assert type(value) is OrderedDict
        assert value["plain"] == expected["plain"]
        assert value["kept"].name == "it"
        assert value["kept"].tensors[0] is value["shared"]
        for tensor, other in zip(value["kept"].tensors, expected["kept"].tensors, strict=True):
            assert tensor.dtype == other.dtype
            assert torch.equal(tensor, other)


def test_what_can_not_be_pickled_is_an_error() -> None:
    def run(comm: Comm) -> Any:
        return broadcast_value(comm, (lambda: 0) if comm.rank == 0 else None, 0, torch.device("cpu"))

    with pytest.raises(ExecutionError, match="the function that the model returns can't be pickled"):
        InProcessWorld(2).run(run)
