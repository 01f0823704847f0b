"""A batch cut into microbatches, and the results of microbatches merged.

The rule for each leaf of the arguments:

====================================================== =====================================================
a tensor                                               cut along dim 0, or along its ``TensorChunkSpec(dim)``
a tensor of size 1 there, where others have more       the same for every microbatch (a broadcast mask)
a 0-d tensor, anything else, or a ``Replicate()``      the same for every microbatch
a ``BlockMask`` of FlexAttention                       cut along its batch, unless that is 1
a list with as many entries as samples                 refused, unless a spec says what it is
a list, where all tensors are in lists                 refused, unless a spec says what it is
====================================================== =====================================================

There are always exactly as many microbatches as asked for. One is the arguments as they are, which need not
agree about a batch. Where the batch does not divide evenly, the first microbatches are larger by one, and
`MicrobatchPlan.weights` are the weights of the microbatches in a mean.

Tensors without a spec have one batch size. One with a ``TensorChunkSpec`` may have another size: 128, 256 and
512 rows become two microbatches of 64, 128 and 256 rows. Samples are then counted in the tensors without a
spec, or else in the first tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita._torch.containers.pytree import TreeSpec, flatten, flatten_with_path, unflatten
from partita._torch.graph_module.block_mask import shift_masks
from partita.errors import MicrobatchError
from partita.runtime.chunk_specs import Reduce, Replicate, Spec, TensorChunkSpec, WeightedMean, match_specs
from partita.runtime.example_arguments import ExampleArguments
from partita.runtime.sample_lists import BY_YOURSELF, check_counted, check_lists, check_output, has_lists

__all__ = [
    "CutBatch",
    "MicrobatchPlan",
    "cut_batch",
    "merge",
    "merge_step",
    "plan_microbatches",
    "split_args",
    "split_tree",
]


@dataclass(frozen=True)
class MicrobatchPlan:
    """How many samples each microbatch has.

    >>> MicrobatchPlan.even(10, 4).sizes
    (3, 3, 2, 2)
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise MicrobatchError(f"each of the microbatches needs a sample: sizes are {self.sizes}")

    @classmethod
    def even(cls, batch: int, chunks: int) -> MicrobatchPlan:
        """Divide `batch` samples into exactly `chunks` microbatches of sizes that differ by one at most,
        larger ones first.

        Raises:
            MicrobatchError: fewer than one microbatch, or fewer samples than microbatches.
        """
        if chunks < 1:
            raise MicrobatchError(f"a batch is cut into at least one microbatch, not {chunks}")
        if batch < chunks:
            fewer = f"use at most {batch}, or a larger batch" if batch else "give a larger batch"
            raise MicrobatchError(f"a batch of {batch} can't fill {chunks} microbatches: {fewer}")
        size, more = divmod(batch, chunks)
        return cls((size + 1,) * more + (size,) * (chunks - more))

    @property
    def total(self) -> int:
        """The size of the whole batch."""
        return sum(self.sizes)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each microbatch in the mean over the batch; they sum to 1."""
        return tuple(size / self.total for size in self.sizes)


def split_args(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each of `chunks` microbatches, in order; tensors are views of those given.

    A spec has the structure of the arguments, or holds for a whole subtree; None, or a keyword that is left
    out, means the default rule.

    >>> x, mask = torch.arange(5), torch.ones(1, 8)
    >>> [(a[0].tolist(), k["mask"].shape[0]) for a, k in split_args((x,), {"mask": mask}, 2)]
    [([0, 1, 2], 1), ([3, 4], 1)]

    Raises:
        MicrobatchError: fewer samples than microbatches, tensors that disagree about the batch, or a spec
            that does not fit.
    """
    return list(cut_batch(args, kwargs, chunks, args_spec, kwargs_spec).trees())


def split_tree(tree: Any, chunks: int) -> tuple[list[Any], MicrobatchPlan]:
    """Return the microbatches of one value, cut as by `split_args`, and how many samples each has. Lists are
    cut in each of their entries.

    >>> split_tree({"y": torch.arange(3)}, 2)[0]
    [{'y': tensor([0, 1])}, {'y': tensor([2])}]
    """
    batch = _cut((tree,), None, chunks)
    if isinstance(tree, torch.Tensor):
        return [part for (part,) in batch.parts()], batch.plan
    return [args[0] for args, _ in batch.trees()], batch.plan


def plan_microbatches(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
) -> MicrobatchPlan:
    """Return the sizes of the microbatches that `split_args` makes of the same arguments; raise its errors.

    Where no tensor is cut, all microbatches are the same and count as one sample each.
    """
    return cut_batch(args, kwargs, chunks, args_spec, kwargs_spec).plan


@dataclass(frozen=True)
class CutBatch:
    """The flat arguments of a batch, and how they are cut, with each microbatch's samples in ``plan``."""

    plan: MicrobatchPlan
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _leaves: Sequence[_Leaf]
    _structure: TreeSpec

    def parts(self) -> Iterator[tuple[Any, ...]]:
        """Iterate over the microbatches' leaves, in order; tensors are views of those given."""
        if not self._leaves:
            return iter([()] * len(self.plan.sizes))
        return zip(*(leaf.parts(self.plan) for leaf in self._leaves), strict=True)

    def trees(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Iterate over the microbatches' positional and keyword arguments, in order. Masks of FlexAttention
        are shifted to their samples.
        """
        parts = [self.tree(leaves) for leaves in self.parts()]
        shift_masks(self._arguments, parts)
        return iter(parts)

    def sizes(self) -> list[tuple[int, ...]]:
        """Return, for each microbatch, its number of samples and of rows of each tensor with a size of its
        own: microbatches with equal numbers have arguments of equal shapes.
        """
        plans = (leaf.own_plan(self.plan) for leaf in self._leaves)
        own = [plan.sizes for plan in plans if plan is not None]
        return list(zip(self.plan.sizes, *own, strict=True))

    def counted(self) -> list[torch.Tensor]:
        """Return the tensors that are cut."""
        return [leaf.value for leaf in self._leaves if leaf.dim is not None]

    def tree(self, parts: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a microbatch's leaves as positional and keyword arguments."""
        args, kwargs = unflatten(parts, self._structure)
        return args, kwargs


def cut_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
    example: ExampleArguments | None = None,
) -> CutBatch:
    """Return what `split_args` and `plan_microbatches` do at once, and flat, which is faster.

    Args:
        example: what the model was cut with. Lists like its lists are no lists of samples.

    Raises:
        MicrobatchError: as `split_args`.
    """
    batch = _cut(args, kwargs, chunks, args_spec, kwargs_spec)
    if chunks > 1 and has_lists((*args, kwargs)):
        if example is not None and example.has_lists_of(*batch.tree(next(batch.parts()))):
            return batch
        for number, value in enumerate(args):
            spec = None if args_spec is None else args_spec[number]
            check_lists(value, f"args[{number}]", batch.plan.total, spec)
        check_lists(kwargs, "kwargs", batch.plan.total, kwargs_spec)
        check_counted(args, kwargs or {}, (args_spec, kwargs_spec), batch.counted())
    return batch


def _cut(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    chunks: int,
    args_spec: Sequence[Any] | None = None,
    kwargs_spec: Mapping[str, Any] | None = None,
) -> CutBatch:
    leaves = _leaves(args, kwargs or {}, args_spec, kwargs_spec)
    arguments = (tuple(args), dict(kwargs or {}))
    return CutBatch(_plan(leaves, chunks), arguments, leaves, flatten(arguments)[1])


def merge(outputs: Sequence[Any], specs: Any = None) -> Any:
    """Return the result of the whole batch from those of the microbatches, trees of the same structure.

    By default tensors are concatenated along dim 0, 0-d tensors are stacked (a tensor of one value a
    microbatch; ask for :class:`WeightedMean` or :class:`Reduce` to get one value), and anything else must be
    equal in all microbatches.

    Raises:
        MicrobatchError: no microbatch, structures or sizes that differ, other values that differ, or a spec
            that does not fit.
    """
    if not outputs:
        raise MicrobatchError("nothing to merge: there is no microbatch's result")
    if specs is None and all(isinstance(output, torch.Tensor) and output.dim() for output in outputs):
        return _joined("output", outputs, 0)
    flat = [flatten_with_path(output, "output") for output in outputs]
    first, structure = flat[0]
    for number, (_, other) in enumerate(flat):
        if other != structure:
            raise MicrobatchError(
                f"microbatch {number} returns {other}, but microbatch 0 {structure}: "
                "return the same structure"
            )
    chosen = match_specs(specs, outputs[0], "specs")
    columns = zip(*([value for _, value in leaves] for leaves, _ in flat), strict=True)
    merged = [
        _merge_leaf(path, list(values), spec)
        for (path, _), values, spec in zip(first, columns, chosen, strict=True)
    ]
    return unflatten(merged, structure)


def merge_step(outputs: Sequence[Any], specs: Any, samples: Sequence[int] = ()) -> Any:
    """Return the result of a step as `merge` does, None where there is none; what may be a list of samples
    needs a spec.

    Args:
        samples: how many each microbatch has; empty where this is not known.

    Raises:
        MicrobatchError: as `merge`; or there is no spec for such a list.
    """
    if specs is None and len(outputs) > 1:
        check_output(outputs[0], samples[0] if samples else 0)
    return merge(outputs, specs) if outputs else None


@dataclass(frozen=True)
class _Leaf:
    """One leaf of the arguments. `dim` is None for what every microbatch gets whole; `chunked`: it has a
    `TensorChunkSpec`.
    """

    path: str
    value: Any
    dim: int | None
    chunked: bool = False

    def own_plan(self, plan: MicrobatchPlan) -> MicrobatchPlan | None:
        """Return how it is cut, where its size is not that of the batch."""
        size = plan.total if self.dim is None else self.value.shape[self.dim]
        if size in (plan.total, 1) or len(plan.sizes) == 1:
            return None
        return MicrobatchPlan.even(size, len(plan.sizes))

    def parts(self, plan: MicrobatchPlan) -> Sequence[Any]:
        """Return each microbatch's part of it."""
        count = len(plan.sizes)
        if count == 1 or self.dim is None or (self.value.shape[self.dim] == 1 and plan.total > 1):
            return (self.value,) * count
        parts: Sequence[Any] = self.value.split((self.own_plan(plan) or plan).sizes, self.dim)
        return parts


def _leaves(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    args_spec: Sequence[Any] | None,
    kwargs_spec: Mapping[str, Any] | None,
) -> list[_Leaf]:
    positional, named = tuple(args), dict(kwargs)
    unknown = sorted(set(kwargs_spec or {}) - set(named))
    if unknown:
        raise MicrobatchError(
            f"kwargs_spec names {unknown}, which are not among the keyword arguments {sorted(named)}"
        )
    chosen = match_specs(None if args_spec is None else tuple(args_spec), positional, "args_spec")
    for name, value in named.items():
        chosen += match_specs((kwargs_spec or {}).get(name), value, f"kwargs_spec[{name!r}]")
    paths = flatten_with_path(positional, "args")[0] + flatten_with_path(named, "kwargs")[0]
    return [
        _Leaf(path, value, _dim(path, value, spec), isinstance(spec, TensorChunkSpec))
        for (path, value), spec in zip(paths, chosen, strict=True)
    ]


def _dim(path: str, value: Any, spec: Spec | None) -> int | None:
    if isinstance(spec, Reduce | WeightedMean):
        raise MicrobatchError(
            f"{path}: {type(spec).__name__} is for results; arguments take TensorChunkSpec or Replicate"
        )
    if isinstance(spec, Replicate) or not isinstance(value, torch.Tensor):
        return None
    if spec is None and value.dim() == 0:
        return None
    dim = spec.dim if spec is not None else 0
    if not -value.dim() <= dim < value.dim():
        raise MicrobatchError(
            f"{path} has {value.dim()} dimensions and can't be cut along dim {dim}: correct its spec"
        )
    return dim % value.dim()


def _plan(leaves: Sequence[_Leaf], chunks: int) -> MicrobatchPlan:
    cut = {leaf.path: (leaf.value.shape[leaf.dim], leaf.chunked) for leaf in leaves if leaf.dim is not None}
    # tensors of size 1 are broadcast against the others
    larger = {path: entry for path, entry in cut.items() if entry[0] != 1} or cut
    counted = {path: size for path, (size, chunked) in larger.items() if not chunked}
    if chunks > 1 and len(set(counted.values())) > 1:
        listed = ", ".join(f"{path} has {size}" for path, size in counted.items())
        raise MicrobatchError(
            f"the tensors disagree about the size of the batch: {listed}. Give a TensorChunkSpec(dim) where "
            "the batch is not in dim 0, or to cut a tensor by itself, and Replicate() for what has no batch; "
            f"where a list has an entry for each sample, {BY_YOURSELF}"
        )
    samples = [*counted.values(), *(size for size, _ in larger.values()), chunks]
    plan = MicrobatchPlan.even(samples[0], chunks)
    for path, (size, _) in larger.items():
        if size < chunks > 1:
            raise MicrobatchError(
                f"{path} has {size} rows, which can't be cut for {chunks} microbatches: give more rows, or "
                "Replicate() for what all of them get"
            )
    return plan


def _merge_leaf(path: str, values: list[Any], spec: Spec | None) -> Any:
    if isinstance(spec, Reduce):
        folded = spec.init
        for value in values:
            folded = spec.fn(folded, value)
        return folded
    if isinstance(spec, WeightedMean):
        if len(spec.weights) != len(values):
            raise MicrobatchError(
                f"{path}: {len(spec.weights)} weights for {len(values)} microbatches: give one for each"
            )
        return sum(value * weight for value, weight in zip(values, spec.weights, strict=True))
    if isinstance(values[0], torch.Tensor) and not isinstance(spec, Replicate):
        if values[0].dim() == 0 and spec is None:
            return torch.stack(values)
        return _joined(path, values, spec.dim if spec is not None else 0)
    if not all(_equal(values[0], value) for value in values):
        raise MicrobatchError(
            f"{path} differs between microbatches ({', '.join(repr(value) for value in values[:4])}): "
            "give a Reduce() that says how to combine its values"
        )
    return values[0]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def _joined(path: str, values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    try:
        return torch.cat(tuple(values), dim)
    except (RuntimeError, IndexError) as error:  # of shapes that don't fit
        shapes = ", ".join(str(list(value.shape)) for value in values[:4])
        raise MicrobatchError(
            f"{path} of the microbatches, of shapes {shapes}, can't be joined along dimension {dim}: call "
            "step(..., return_outputs=False) where only losses are wanted; let the model pad it to one size; "
            "or get a list, with Reduce(lambda parts, value: [*parts, value], []) as output_merge_spec"
        ) from error
