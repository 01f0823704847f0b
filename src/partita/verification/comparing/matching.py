"""Matching the parameters and buffers of the candidate with those of the reference.

For each name of the candidate, the first of these rules that gives a name of the reference:

1. the same tensor object (a split whose pieces own the reference's very parameters);
2. the same name;
3. the same name after the name of the piece, or after any leading components (``submod_0.layers.0.weight`` is
   ``layers.0.weight``; so is ``_orig_mod.layers.0.weight``), the longest that fits;
4. the same with every character that can't stand in an identifier read as ``_``
   (``L__self___layers_0_weight``);
5. the reverse of 3: the reference has the longer name, and only one such name ends so.

A wrong match can't hide a difference: matched tensors must have had the same value before the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["match_names"]


def match_names(candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, str]:
    """Return the reference name of every candidate name that has one.

    >>> match_names({"submod_0.fc.weight": 1.5, "extra": 2.5}, {"fc.weight": 3.5, "fc.bias": 4.5})
    {'submod_0.fc.weight': 'fc.weight'}
    """
    by_identity: dict[int, str] = {}
    for name, value in reference.items():
        by_identity.setdefault(id(value), name)
    flattened = _unique((_flat(name), name) for name in reference)
    endings = _unique((ending, name) for name in reference for ending in _endings(name, "."))
    matched = {}
    for name, value in candidate.items():
        # Of the names of a tied tensor, the candidate's own is a better answer than the first.
        match = name if reference.get(name) is value else by_identity.get(id(value))
        match = match or next((ending for ending in _endings(name, ".") if ending in reference), None)
        match = match or next(
            (flattened[ending] for ending in _endings(_flat(name), "_") if ending in flattened), None
        )
        match = match or endings.get(name)
        if match is not None:
            matched[name] = match
    return matched


def _endings(name: str, separator: str) -> Iterator[str]:
    """The name itself, then without its first component, and so on: the longest first."""
    parts = name.split(separator)
    for start in range(len(parts)):
        yield separator.join(parts[start:])


def _flat(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _unique(pairs: Iterator[tuple[str, str]]) -> dict[str, str]:
    """The keys that have one name only, with that name."""
    names: dict[str, str | None] = {}
    for key, name in pairs:
        names[key] = name if names.get(key, name) == name else None
    return {key: name for key, name in names.items() if name is not None}
