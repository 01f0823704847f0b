"""A number for the calls of torch in a pass, which is equal on two stages where their code makes equal ones.

Answers are given by order and by name of the function. Code that makes equally named calls in another order
would get each other's, without a word::

    for kind in {"full", "sliding"}:                # strings of a set: in another order in each process
        tables[kind] = torch.cos(x * frequencies[kind])
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from partita.pipelining.blocks.replaying.numbered_tensors import NumberedTensors

__all__ = ["CallsDigest", "CallsOfPass"]

_NUMBERS = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class CallsOfPass:
    """The calls of a pass, up to some point.

    Attributes:
        operands: of functions and their operands, in order.
        numbers: of functions and the numbers and strings that they are given, in order.
        in_any_order: of the same in any order.
    """

    operands: int = 0
    numbers: int = 0
    in_any_order: int = 0

    def are_equal(self, other: CallsOfPass) -> bool:
        """Whether two stages have made the same calls. A number that is another one on a later stage is none
        of its business: it has been changed where it is used, as a factor between two steps. The same numbers
        in another order are other calls.
        """
        same_numbers = self.numbers == other.numbers or self.in_any_order != other.in_any_order
        return self.operands == other.operands and same_numbers


class CallsDigest:
    """Counts the calls of one pass together.

    Args:
        tensors: of the pass; operands have numbers there.
        state: the names of parameters and buffers, by identity.
    """

    def __init__(self, tensors: NumberedTensors, state: Mapping[int, str]) -> None:
        self._tensors = tensors
        self._state = state
        self._operands: list[tuple[str, list[str | int]]] = []
        self._numbers: list[tuple[str, list[Any]]] = []
        self._calls = CallsOfPass()

    def note(self, name: str, operands: Iterable[Tensor], args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note a call of a function of that name, with operands that have numbers."""
        tensors, which = self._tensors, list[str | int]()
        for operand in operands:
            number = tensors.by_identity[id(operand)]
            # State has the number of its first use, which is the same one for whatever is used first.
            which.append(self._state.get(id(operand), "") if number in tensors.state else number)
        self._operands.append((name, which))
        leaves = [*args, *kwargs.values()] if kwargs else args
        constants = [value for value in leaves if type(value) in _NUMBERS]
        if constants:
            self._numbers.append((name, constants))

    @property
    def calls(self) -> CallsOfPass:
        """Those up to now."""
        before, numbers = self._calls, [repr(one).encode() for one in self._numbers]
        self._calls = CallsOfPass(
            zlib.crc32(b"".join(repr(one).encode() for one in self._operands), before.operands),
            zlib.crc32(b"".join(numbers), before.numbers),
            before.in_any_order + sum(map(zlib.crc32, numbers)),
        )
        self._operands.clear()
        self._numbers.clear()
        return self._calls
