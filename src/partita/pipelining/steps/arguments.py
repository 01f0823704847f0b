"""The model's arguments, cut into microbatches, as the first stage takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from partita.pipelining.routes import Routes
from partita.pipelining.stages.stage import Stage
from partita.runtime import CutBatch

__all__ = ["cut_arguments"]


def cut_arguments(
    first: Stage, routes: Routes, batch: CutBatch, *, train: bool
) -> tuple[list[dict[str, Tensor]], tuple[int, ...]]:
    """The tensors of each microbatch by name, and of each its number of samples and its open sizes.

    Microbatches of equal sizes look alike, since all are views of one batch: one of each is checked.

    Args:
        first: the first stage.

    Raises:
        SignatureMismatch: what the pipeline was not cut for; nothing has been sent by then.
    """
    arguments: list[dict[str, Tensor]] = []
    numbers: list[int] = []
    checked: dict[tuple[int, ...], tuple[int, ...]] = {}
    places: list[tuple[str, int]] | None = None
    for microbatch, (size, parts) in enumerate(zip(batch.sizes(), batch.parts(), strict=True)):
        if places is None or size not in checked:
            flat = first.signature.flatten(*batch.tree(parts))
            found = first.accept(flat, microbatch, train=train)
            sizes = routes.sizes_of(flat)
            routes.at(sizes, first.module.training)
            checked[size] = sizes
            places = _places(found, parts)
        else:
            found = {name: parts[place] for name, place in places}
        arguments.append(found)
        numbers += (size[0], *checked[size])
    return arguments, tuple(numbers)


def _places(found: dict[str, Tensor], parts: Sequence[Any]) -> list[tuple[str, int]] | None:
    """Where each of the tensors lies among the leaves; None where the model's structures make others of
    them.
    """
    at = {id(part): place for place, part in enumerate(parts)}
    if not all(id(value) in at for value in found.values()):
        return None
    return [(name, at[id(value)]) for name, value in found.items()]
