"""Samples: other inputs of the same kind as an example, on which a captured graph is proven too.

::

    example     ids [2, 8] in 5..90       mask [2, 8] all ones       x [2, 4] in -2.1..1.7
    sample      ids [3, 8] in 5..90       mask 1 1 1 1 1 0 0 0       x [3, 4] in -2.1..1.7
                                               1 1 0 0 0 0 0 0 ...
    sample      other ids                 mask all ones              another x
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partita._torch.containers.pytree import flatten_with_path, unflatten
from partita.capture.open_sizes.sizes import Sizes, evaluated

__all__ = ["Sample", "samples", "single_samples"]

_TWO = 2


@dataclass(frozen=True, eq=False)
class Sample:
    """Arguments for a model.

    Attributes:
        kind: the difference from the example, in words.
        other_weights: whether the model runs with other parameters and buffers.
        gentle: the same with the example's rows of integers, for a model that accepts no others.
        before: arguments like these for a call that is made before this one, if any.
    """

    kind: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    other_weights: bool = False
    gentle: Sample | None = None
    before: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def alone(self) -> Sample:
        """The same without a call before."""
        return replace(self, gentle=self.gentle and self.gentle.alone, before=None)


def samples(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Sizes, names: list[str], seed: int = 0
) -> Iterator[Sample]:
    """Return the example and other samples.

    They have other values in the example's range, masks of ones and masks with padding, other weights, a call
    before them, and a larger batch where its size is open.

    Args:
        sizes: of the captured graph.
        names: of its inputs, one for each leaf of the arguments.
        seed: of the random values.
    """
    yield Sample("the example", args, dict(kwargs))
    kind = _Kind(args, kwargs, names, seed)
    larger = kind.shapes(sizes, 1)
    more = ", and one more in the batch" if larger != kind.own_shapes else ""
    padding = " and padding" if kind.masked else ""
    yield kind.sample(f"a sample with other values{padding}{more}", larger, padded=True)
    if kind.masked:
        yield kind.sample("a sample with a mask that hides nothing", kind.own_shapes, padded=False)


def single_samples(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Sizes, names: list[str], seed: int = 0
) -> Iterator[Sample]:
    """Yield two samples of the example's kind with a batch of one: with masks that hide something, and with
    masks that hide nothing. The second is longer where its other sizes are open.
    """
    kind = _Kind(args, kwargs, names, seed)
    for longer, padded in ((0, True), (1, False)):
        shapes = kind.single_shapes(sizes, longer) or kind.single_shapes(sizes, 0) or kind.own_shapes
        yield kind.sample("a batch of one", shapes, padded=padded)


class _Kind:
    """Draws samples that have in common with the example what a model may depend on."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: list[str], seed: int) -> None:
        leaves, self._structure = flatten_with_path((args, dict(kwargs)))
        called = dict(enumerate(names))  # "mask" says more than "[0][1]"
        self._leaves = [
            (f"{path} {called.get(number, '')}", leaf) for number, (path, leaf) in enumerate(leaves)
        ]
        self._names = names
        self._generator = torch.Generator().manual_seed(seed)
        self.own_shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for _, leaf in leaves]
        self.masked = any(_is_mask(path, leaf) for path, leaf in self._leaves)

    def shapes(self, sizes: Sizes, more: int) -> list[tuple[int, ...]]:
        """Return the shape of each leaf, with ``more`` in the batch if that is allowed."""
        at = {name: size + more for name, size in self._own_sizes(sizes).items()}
        return self._shapes_at(sizes, at) or self.own_shapes

    def single_shapes(self, sizes: Sizes, more: int) -> list[tuple[int, ...]] | None:
        """Return the shape of each leaf with a batch of one, and ``more`` in other open sizes; None if that
        is not allowed.
        """
        at = {name: size + more for name, size in self._own_sizes(sizes).items()}
        return self._shapes_at(sizes, sizes.of_one_sample(at))

    def _own_sizes(self, sizes: Sizes) -> dict[str, int]:
        own = dict(zip(self._names, self.own_shapes, strict=False))
        return {symbol.name: own[symbol.input][symbol.dim] for symbol in sizes.symbols}

    def _shapes_at(self, sizes: Sizes, at: Mapping[str, int]) -> list[tuple[int, ...]] | None:
        if not at or not all(condition.holds(at) for condition in sizes.conditions):
            return None
        return [
            evaluated(sizes.shapes[name], at) if name in sizes.shapes else shape
            for name, shape in zip(self._names, self.own_shapes, strict=False)
        ]

    def sample(self, text: str, shapes: list[tuple[int, ...]], *, padded: bool) -> Sample:
        """Draw one sample; those with padding have other weights too, and come after a call of their kind."""

        def draw(text: str, gentler: Sample | None) -> Sample:
            one, before = (self._drawn(shapes, padded=padded, gentle=gentler is None) for _ in range(2))
            return Sample(text, *one, padded, gentler, before if padded else None)

        return draw(text, draw(f"{text} (integers as in the example)", None))

    def _drawn(
        self, shapes: list[tuple[int, ...]], *, padded: bool, gentle: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = [
            _anew(path, leaf, shape, self._generator, padded=padded, gentle=gentle)
            if isinstance(leaf, Tensor)
            else leaf
            for (path, leaf), shape in zip(self._leaves, shapes, strict=True)
        ]
        args, kwargs = unflatten(values, self._structure)
        return args, kwargs


def _is_mask(path: str, leaf: Any) -> bool:
    """Whether a tensor looks like a mask: two dimensions, a name that says so, and only zeros and ones."""
    if not isinstance(leaf, Tensor) or leaf.dim() != _TWO or "mask" not in path.lower():
        return False
    return bool(((leaf == 0) | (leaf == 1)).all())


def _anew(
    path: str, leaf: Tensor, shape: tuple[int, ...], generator: torch.Generator, *, padded: bool, gentle: bool
) -> Tensor:
    """A new tensor of that shape on the same device, with values such as ``leaf`` has. A sparse one, such as
    the adjacency matrix of a graph, stays as it is.
    """
    if leaf.layout is not torch.strided:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    flat = leaf.detach().reshape(-1).cpu()
    if not flat.numel() or 0 in shape:
        return leaf.detach().new_zeros(shape)
    if _is_mask(path, leaf):
        values = _mask(shape, generator) if padded else torch.ones(shape)
    elif leaf.is_floating_point() and flat.unique().numel() > _TWO and bool(torch.isfinite(flat).all()):
        values = _between(flat.double(), shape, generator)
    elif gentle or leaf.dim() == 0 or leaf.is_complex():
        values = _rolled(leaf.detach().cpu(), shape)
    else:
        values = flat[torch.randint(flat.numel(), shape, generator=generator)]
    values = values.to(leaf.dtype).to(leaf.device)
    if leaf.requires_grad:
        values.requires_grad_()
    return values


def _between(flat: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Each element between two of the example's: in its range, and with a similar distribution."""
    one, two = (flat[torch.randint(flat.numel(), shape, generator=generator)] for _ in range(2))
    share = torch.rand(shape, generator=generator, dtype=torch.float64)
    return one * share + two * (1 - share)


def _mask(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Ones, with zeros at the end of most rows; the first half of every row is ones."""
    rows, length = shape
    kept = torch.randint((length + 1) // _TWO, length + 1, (rows, 1), generator=generator)
    kept[0] = (length + 1) // _TWO
    return (torch.arange(length)[None] < kept).long()


def _rolled(leaf: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The example's rows in another order; rows, and what each has, are repeated where more are needed."""
    if leaf.dim() == 0:
        return leaf.clone()
    for dim, (length, own) in enumerate(zip(shape, leaf.shape, strict=True)):
        order = (torch.arange(length, device=leaf.device) + (dim == 0)) % own
        leaf = leaf.index_select(dim, order)
    return leaf
