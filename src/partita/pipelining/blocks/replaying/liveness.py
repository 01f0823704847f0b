"""Which local variables a function that is being executed may still read."""

from __future__ import annotations

import dis
from bisect import bisect_right
from functools import lru_cache
from types import CodeType

__all__ = ["variables_read_later"]

_LEAVE = ("RETURN", "RAISE", "RERAISE")
_JUMP = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE", "JUMP")


@lru_cache(maxsize=4096)
def variables_read_later(code: CodeType, offset: int) -> frozenset[str]:
    """Return the variables that some path from the instruction at ``offset`` on reads before it writes them.

    Paths through exception handlers are not followed. Variables that inner functions share count as read.

    >>> def steps(x, y, z):
    ...     x = len(z)
    ...     return x + y
    >>> sorted(variables_read_later(steps.__code__, 0))
    ['y', 'z']
    """
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    before: list[frozenset[str]] = [frozenset()] * (len(instructions) + 1)
    changed = True
    while changed:
        changed = False
        for place in range(len(instructions) - 1, -1, -1):
            live = _live_before(instructions[place], place, places, before)
            if live != before[place]:
                before[place] = live
                changed = True
    shared = frozenset((*code.co_cellvars, *code.co_freevars))
    return before[bisect_right(list(places), offset)] | shared  # the offset may be that of an inline cache


def _live_before(
    instruction: dis.Instruction, place: int, places: dict[int, int], before: list[frozenset[str]]
) -> frozenset[str]:
    name = instruction.opname
    live: frozenset[str] = frozenset()
    if not name.startswith(_LEAVE) and name not in _JUMP:
        live = before[place + 1]
    if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
        live |= before[places[instruction.argval]]
    if "FAST" in name:
        argument = instruction.argval
        names = argument if isinstance(argument, tuple) else (argument,)
        for variable, action in reversed(list(zip(names, _actions(name), strict=False))):
            live = live - {variable} if action == "STORE" else live | {variable}
    return live


def _actions(name: str) -> list[str]:
    """What an instruction does to each of its one or two variables, in order."""
    return [
        "STORE" if part == "STORE" else "LOAD"
        for part in name.split("_")
        if part in ("STORE", "LOAD", "DELETE")
    ]
