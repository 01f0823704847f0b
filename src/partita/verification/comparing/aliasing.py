"""Which tensors share memory: a caller sees it when it writes to one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from partita._torch.tensors.storage import storage_key
from partita.verification.comparing.compare import Mismatch

__all__ = ["Place", "compare_places", "places"]


@dataclass(frozen=True)
class Place:
    """Where one tensor lies, relative to the first named tensor that lies on the same storage.

    Attributes:
        same_object_as: the first name that stands for this very tensor object (its own name, if it is the
            first).
        shares_with: the first name on this storage (its own name, if it is the first).
        offset: elements from the start of that first tensor; 0 for the first itself.
        strides: of the dimensions with more than one element, in elements; empty for the first itself.
    """

    same_object_as: str
    shares_with: str
    offset: int = 0
    strides: tuple[int, ...] = ()


def places(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Place]:
    """Return the place of each tensor. They must all be alive meanwhile, or two could have one identity.

    >>> x = torch.zeros(4)
    >>> places([("x", x), ("y", x[1:])])["y"]
    Place(same_object_as='y', shares_with='x', offset=1, strides=(1,))
    """
    first_object: dict[int, str] = {}
    first_on: dict[int, tuple[str, int]] = {}
    named_places = {}
    for name, tensor in named:
        same = first_object.setdefault(id(tensor), name)
        storage = _storage(tensor)
        if storage is None:
            named_places[name] = Place(same, same)
            continue
        start = int(tensor.storage_offset())
        owner, base = first_on.setdefault(storage, (name, start))
        if owner == name:
            named_places[name] = Place(same, owner)
            continue
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        strides = tuple(stride for size, stride in pairs if size > 1)
        named_places[name] = Place(same, owner, start - base, strides)
    return named_places


def compare_places(candidate: Mapping[str, Place], reference: Mapping[str, Place]) -> list[Mismatch]:
    """Return where the two differ. Both must have the same names."""
    return [
        Mismatch(name, f"{_words(name, candidate[name])}; in the reference it {_words(name, place)}")
        for name, place in reference.items()
        if candidate[name] != place
    ]


def _storage(tensor: torch.Tensor) -> int | None:
    """The key of the storage, or None where there is no memory that could be shared."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.numel() == 0:
        return None
    return storage_key(tensor)


def _words(name: str, place: Place) -> str:
    if place.same_object_as != name:
        return f"is {place.same_object_as} itself"
    if place.shares_with != name:
        return (
            f"shares the memory of {place.shares_with} (offset {place.offset}, strides {list(place.strides)})"
        )
    return "has memory of its own"
