"""Which parameter or buffer of the candidate is which of the reference's.

In this order, the first that gives an answer:

1. the same tensor object (a split whose pieces own the reference's very parameters);
2. the same name;
3. the same name after the name of the piece, or after any leading components (``submod_0.layers.0.weight`` is
   ``layers.0.weight``; so is ``_orig_mod.layers.0.weight``), the longest that fits;
4. the same with every character that can't stand in an identifier read as ``_``
   (``L__self___layers_0_weight``);
5. the reverse of 3: the reference has the longer name, and only one such name ends so.

A wrong guess can't hide anything: what is matched must have had the same value before the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["match_names"]


def match_names(candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, str]:
    """Candidate name -> reference name, for every candidate name that has one.

    >>> match_names({"submod_0.fc.weight": 1.5, "extra": 2.5}, {"fc.weight": 3.5, "fc.bias": 4.5})
    {'submod_0.fc.weight': 'fc.weight'}
    """
    by_identity: dict[int, str] = {}
    for name, held in reference.items():
        by_identity.setdefault(id(held), name)
    flattened = _unique((_flat(name), name) for name in reference)
    endings = _unique((ending, name) for name in reference for ending in _endings(name, "."))
    matched = {}
    for name, held in candidate.items():
        # Of tied names, the one that the candidate uses too is the better answer than the first.
        found = name if reference.get(name) is held else by_identity.get(id(held))
        found = found or next((ending for ending in _endings(name, ".") if ending in reference), None)
        found = found or next(
            (flattened[end] for end in _endings(_flat(name), "_") if end in flattened), None
        )
        found = found or endings.get(name)
        if found is not None:
            matched[name] = found
    return matched


def _endings(name: str, separator: str) -> Iterator[str]:
    """The name itself, then without its first component, and so on: the longest first."""
    parts = name.split(separator)
    for start in range(len(parts)):
        yield separator.join(parts[start:])


def _flat(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _unique(pairs: Iterator[tuple[str, str]]) -> dict[str, str]:
    """Keys that lead to one name; a key that leads to two is no answer."""
    found: dict[str, str | None] = {}
    for key, name in pairs:
        found[key] = name if found.get(key, name) == name else None
    return {key: name for key, name in found.items() if name is not None}
