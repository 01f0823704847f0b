"""Other inputs of the same kind as an example: what a captured graph is proven on besides the example itself.

::

    example     ids [2, 8] in 5..90       mask [2, 8] all ones       x [2, 4] in -2.1..1.7
    sample      ids [3, 8] in 5..90       mask 1 1 1 1 1 0 0 0       x [3, 4] in -2.1..1.7
                                               1 1 0 0 0 0 0 0 ...
    sample      other ids                 mask all ones              another x
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita._torch.pytree import flatten_with_path, unflatten
from partita.capture.sizes import Sizes, evaluated

__all__ = ["Sample", "samples"]

_TWO = 2


@dataclass(frozen=True, eq=False)
class Sample:
    """Arguments for a model.

    Attributes:
        kind: what is different from the example, in words.
        other_weights: whether the model's own numbers are to be others too.
        gentle: the same with rows of integers as the example has them, for a model that takes no others.
    """

    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    other_weights: bool = False
    gentle: Sample | None = None


def samples(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Sizes, names: list[str], seed: int = 0
) -> Iterator[Sample]:
    """The example, and others: values drawn anew from those that the example has, masks of ones and masks
    with padding, other weights, and a sample more in the batch where its size is open.

    Args:
        sizes: of the captured graph.
        names: of its inputs, one for each leaf of the arguments.
        seed: of what is drawn.
    """
    leaves, structure = flatten_with_path((args, dict(kwargs)))
    called = dict(enumerate(names))  # "mask" says more than "[0][1]"
    leaves = [(f"{path} {called.get(number, '')}", leaf) for number, (path, leaf) in enumerate(leaves)]
    yield Sample("the example", args, dict(kwargs))
    shapes = _larger(sizes, names, [leaf for _, leaf in leaves])
    generator = torch.Generator().manual_seed(seed)
    masks = any(_is_mask(path, leaf) for path, leaf in leaves)

    def drawn(padded: bool, gentle: bool, larger: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = []
        for number, (path, leaf) in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                values.append(leaf)
                continue
            shape = shapes[number] if larger else tuple(leaf.shape)
            values.append(_anew(path, leaf, shape, generator, padded=padded, gentle=gentle))
        new_args, new_kwargs = unflatten(values, structure)
        return new_args, new_kwargs

    others = [("with other values" + (" and padding" if masks else ""), True, True)]
    if masks:
        others.append(("with a mask that hides nothing", False, False))
    for kind, padded, larger in others:
        larger = larger and shapes != [
            tuple(leaf.shape) if isinstance(leaf, Tensor) else () for _, leaf in leaves
        ]
        kind = f"a sample {kind}{', and one more in the batch' if larger else ''}"
        careful = Sample(f"{kind} (integers as in the example)", *drawn(padded, True, larger), padded)
        yield Sample(kind, *drawn(padded, False, larger), padded, careful)


def _larger(sizes: Sizes, names: list[str], leaves: list[Any]) -> list[tuple[int, ...]]:
    """The shape of each leaf with one more in the batch, where that is open and allowed."""
    shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]
    given = dict(zip(names, leaves, strict=False))
    at = {symbol.name: int(given[symbol.input].shape[symbol.dim]) + 1 for symbol in sizes.symbols}
    if not at or not all(condition.holds(at) for condition in sizes.conditions):
        return shapes
    return [
        evaluated(sizes.shapes[name], at) if name in sizes.shapes else shape
        for name, shape in zip(names, shapes, strict=False)
    ]


def _is_mask(path: str, leaf: Any) -> bool:
    """Whether it says of each place of a row whether it counts."""
    if not isinstance(leaf, Tensor) or leaf.dim() != _TWO or "mask" not in path.lower():
        return False
    return bool(((leaf == 0) | (leaf == 1)).all())


def _anew(
    path: str, leaf: Tensor, shape: tuple[int, ...], generator: torch.Generator, *, padded: bool, gentle: bool
) -> Tensor:
    """A tensor of that shape, with values such as ``leaf`` has; its own memory, on the same device."""
    flat = leaf.detach().reshape(-1).cpu()
    if not flat.numel() or 0 in shape:
        return leaf.detach().new_zeros(shape)
    if _is_mask(path, leaf):
        made = _mask(shape, generator) if padded else torch.ones(shape)
    elif leaf.is_floating_point() and flat.unique().numel() > _TWO and bool(torch.isfinite(flat).all()):
        made = _between(flat.double(), shape, generator)
    elif gentle or leaf.dim() == 0 or leaf.is_complex():
        made = _rolled(leaf.detach().cpu(), shape)
    else:
        made = flat[torch.randint(flat.numel(), shape, generator=generator)]
    made = made.to(leaf.dtype).to(leaf.device)
    if leaf.requires_grad:
        made.requires_grad_()
    return made


def _between(flat: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Each between two of the example's values: in its range, and like it distributed."""
    one, two = (flat[torch.randint(flat.numel(), shape, generator=generator)] for _ in range(2))
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    return one * share + two * (1 - share)


def _mask(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Ones, with zeros at the end of most rows; every row keeps its first half."""
    rows, length = shape
    kept = torch.randint((length + 1) // _TWO, length + 1, (rows, 1), generator=generator)
    kept[0] = (length + 1) // _TWO
    return (torch.arange(length)[None] < kept).long()


def _rolled(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The example's rows in another order, the first again where more are wanted."""
    if leaf.dim() == 0:
        return leaf.clone()
    rows = (torch.arange(shape[0]) + 1) % leaf.shape[0]
    return leaf[rows] if tuple(leaf.shape[1:]) == tuple(shape[1:]) else leaf.expand(shape).clone()
