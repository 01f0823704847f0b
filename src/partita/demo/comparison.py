"""Every parameter of the trained stages against that of the trained uncut model, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from partita.errors import ExecutionError

__all__ = ["Comparison", "compare_parameters"]


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing all parameters.

    Attributes:
        largest: largest absolute difference of any number.
        where: name of the parameter in which it lies; empty where all are equal.
        bitwise: whether all bits are equal.
        compared: how many numbers were compared, copies included.
    """

    largest: float
    where: str
    bitwise: bool
    compared: int


def compare_parameters(uncut: Path, ranks: Sequence[Path]) -> Comparison:
    """Compare what each rank has saved with what the uncut training has saved.

    Raises:
        ExecutionError: a name is missing on either side.
    """
    expected = load_file(uncut)
    seen: set[str] = set()
    largest, where, bitwise, compared = 0.0, "", True, 0
    for path in ranks:
        for name, value in load_file(path).items():
            if name not in expected:
                raise ExecutionError(f"{path.name} holds {name!r}, which the uncut model does not have")
            seen.add(name)
            compared += value.numel()
            if torch.equal(_bits(value), _bits(expected[name])):
                continue
            bitwise = False
            difference = float((value.double() - expected[name].double()).abs().max())
            if difference > largest or not where:
                largest, where = max(largest, difference), name
    missing = sorted(set(expected) - seen)
    if missing:
        raise ExecutionError(f"no rank holds {missing[0]!r} ({len(missing)} names are missing)")
    return Comparison(largest, where, bitwise, compared)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)
