"""Where a model is cut between calls of its modules, and what crosses there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BlockCut", "Event", "Site"]

Event = tuple[str, int, bool]
"""A call of a module begins or ends: its qualified name, the number of the call in this forward pass, and
whether it ends."""

Site = tuple[Any, ...]
"""The place that makes a value: the call of the innermost module, the line of code, the function, and which
of its results. Loops make several values at one site."""


@dataclass(frozen=True)
class BlockCut:
    """How one model is cut. Can be pickled.

    Attributes:
        stages: how many there are.
        borders: by mode (True: training), the stage that begins with an event.
        homes: by a module's name, the stage that all of its calls belong to.
        unused: by mode, for each stage, the sites of values that were alive at its beginning in the example
            and used neither there nor later. Everything else that is alive is handed on.
        written: sites of values that a later stage writes to.
    """

    stages: int
    borders: Mapping[bool, Mapping[Event, int]]
    homes: Mapping[str, int]
    unused: Mapping[bool, Mapping[int, frozenset[Site]]] = field(repr=False)
    written: frozenset[Site] = field(default=frozenset(), repr=False)

    def is_written(self, site: Site) -> bool:
        """Whether a later stage writes to values of this site: for an argument, at any of its places."""
        places = site[1:] if site[0] == "argument" else ()
        return site in self.written or any(("argument", place) in self.written for place in places)

    def outermost(self, stage: int) -> list[str]:
        """Return the modules of one stage that lie in no other module of that stage, in order."""
        own = {path for path, home in self.homes.items() if home == stage}
        return [path for path in self.homes if path in own and not _parents(path) & own]


def _parents(path: str) -> set[str]:
    atoms = path.split(".")
    return {".".join(atoms[:length]) for length in range(len(atoms))}
