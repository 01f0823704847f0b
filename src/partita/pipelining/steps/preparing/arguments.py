"""The arguments of a step in microbatches, cut here or by the user, and as the first stage takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from partita.errors import MicrobatchError
from partita.pipelining.stages.graph_stage import GraphStage
from partita.pipelining.steps.loss_weights import LossWeights, step_weights
from partita.pipelining.steps.preparing.agreement import BatchSizes
from partita.runtime import CutBatch, cut_batch, split_tree
from partita.runtime.example_arguments import ExampleArguments
from partita.runtime.sample_lists import first_sizes

__all__ = [
    "Cutting",
    "LossSide",
    "Microbatches",
    "StepArguments",
    "arguments_of_batch",
    "arguments_of_microbatches",
]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a batch is cut: into how many microbatches, along which dimensions (by default along 0), and what
    the model was cut with.
    """

    count: int
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    example: ExampleArguments | None = None

    def samples_of_each(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        """How many each microbatch has; where only the rank of the first stage knows, as many as the example,
        since no size of the graph is open.
        """
        by_example = self.example is not None and self.example.signature is not None and self.example.samples
        return samples or ((by_example,) * self.count if by_example else ())


@dataclass(frozen=True)
class Microbatches:
    """The arguments of each microbatch of a step.

    Attributes:
        parts: positional arguments, and those by name.
        samples: how many each has; 0 where its tensors differ in it. Empty where only another rank knows.
    """

    parts: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]
    samples: tuple[int, ...]

    @classmethod
    def from_user(cls, args: Sequence[Any] | None, kwargs: Sequence[Any] | None, count: int) -> Microbatches:
        """From what ``step(arg_mbs=..., kwarg_mbs=...)`` is given.

        Raises:
            MicrobatchError: another number than ``count``, or something that is no tuple or dict.
        """
        positional = [()] * count if args is None else _checked(args, "arg_mbs", count)
        named = [{}] * count if kwargs is None else _checked(kwargs, "kwarg_mbs", count)
        for number, (one, other) in enumerate(zip(positional, named, strict=True)):
            if not isinstance(one, (tuple, list)):
                raise MicrobatchError(
                    f"arg_mbs[{number}] is a {type(one).__name__}: give a tuple of arguments, such as (x,)"
                )
            if not isinstance(other, Mapping):
                raise MicrobatchError(
                    f"kwarg_mbs[{number}] is a {type(other).__name__}: give a dict of keyword arguments"
                )
        parts = tuple((tuple(one), dict(other)) for one, other in zip(positional, named, strict=True))
        return cls(parts, tuple(_samples(one, other) for one, other in parts))


@dataclass(frozen=True, slots=True)
class LossSide:
    """The targets and weights of a step's losses.

    Attributes:
        targets: one for each microbatch; None where there are none.
        weights: the weight of each microbatch's loss; None where it depends on numbers of samples that only
            the first stage's rank knows.
        cut: how many rows each target has; empty where there is none, or the user has made the microbatches.
    """

    targets: Sequence[Any] | None
    weights: tuple[float, ...] | None
    cut: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepArguments:
    """What ``step()`` and ``eval()`` are given: see `PipelineSchedule.step`. Either a batch (``args``,
    ``kwargs``, ``target``) or microbatches (``arg_mbs``, ``kwarg_mbs``, ``target_mbs``).
    """

    cutting: Cutting
    train: bool
    keep_outputs: bool
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    arg_mbs: Sequence[Any] | None
    kwarg_mbs: Sequence[Any] | None
    target_mbs: Sequence[Any] | None
    losses: list[Tensor] | None
    loss_keywords: Mapping[str, Any]
    weights: LossWeights | Sequence[float] | None = None

    @cached_property  # custom functions are shown what the stages are called with
    def microbatches(self) -> Microbatches | None:
        """The microbatches that the user has made; None where there is a batch to be cut.

        Raises:
            MicrobatchError: there are both, or another number than the schedule's.
        """
        if self.arg_mbs is None and self.kwarg_mbs is None:
            return None
        if self.args or self.kwargs:
            raise MicrobatchError(
                "the step is given a batch, and microbatches in arg_mbs or kwarg_mbs: give one or the other"
            )
        return Microbatches.from_user(self.arg_mbs, self.kwarg_mbs, self.cutting.count)

    def cut(self, *, first: bool) -> CutBatch:
        """The batch in microbatches; positional arguments only count where the first stage is.

        Raises:
            MicrobatchError: a batch that can't be cut.
        """
        by = self.cutting
        if first:
            return cut_batch(self.args, self.kwargs, by.count, by.args, by.kwargs, by.example)
        return cut_batch((), self.kwargs, by.count, None, by.kwargs if self.kwargs else None, by.example)

    def in_microbatches(self, *, first: bool) -> Microbatches:
        """The microbatches that the user has made, or those of the batch; see `microbatches` and `cut`."""
        microbatches = self.microbatches
        if microbatches is None:
            batch = self.cut(first=first)
            microbatches = Microbatches(tuple(batch.trees()), batch.plan.sizes)
        return microbatches

    def samples_here(self) -> int:
        """How many samples this rank was given, whether they count or not: the first dimension that all
        tensors share. 0 where there is none, where it is 1, which is broadcast, and where specs cut it.
        """
        if self.cutting.args or self.cutting.kwargs:
            return 0
        microbatches = self.microbatches
        samples = [_samples(self.args, self.kwargs)] if microbatches is None else microbatches.samples
        return sum(samples) if all(samples) and max(samples) > 1 else 0

    def for_loss(self, *, last: bool, scaled: bool) -> LossSide:
        """The targets and weights, as far as this rank knows them by itself.

        Args:
            last: whether this rank has the last stage, the only one whose targets count.
            scaled: see `step_weights`.

        Raises:
            MicrobatchError: weights or targets that can't be used.
        """
        targets, samples = self._targets() if last else (None, ())
        if last and self.train and scaled and self.weights is None and not samples:
            return LossSide(targets, None)
        cut = samples if self.target_mbs is None and self.microbatches is None else ()
        samples = samples if self.train else ()  # in evaluation nothing is weighted
        return LossSide(targets, step_weights(self.weights, samples, self.cutting.count, scaled=scaled), cut)

    def _targets(self) -> tuple[Sequence[Any] | None, tuple[int, ...]]:
        """The target of each microbatch, and how many samples each has."""
        if self.target_mbs is not None:
            if self.target is not None:
                raise MicrobatchError("the step is given a target and target_mbs: give one or the other")
            targets = _checked(self.target_mbs, "target_mbs", self.cutting.count)
            if any(first_sizes(target)[1] for target in targets):
                return (
                    targets,
                    (),
                )  # rows or entries: how many samples there are, the first stage's rank knows
            return targets, tuple(_samples((target,), {}) for target in targets)
        if self.target is None:
            return None, ()
        targets, plan = split_tree(self.target, self.cutting.count)
        return targets, plan.sizes


def _checked(microbatches: Sequence[Any], name: str, count: int) -> Sequence[Any]:
    if not isinstance(microbatches, (list, tuple)):
        raise MicrobatchError(f"{name} is a {type(microbatches).__name__}: give a list, one for a microbatch")
    if len(microbatches) != count:
        raise MicrobatchError(
            f"{name} has {len(microbatches)} microbatches, but the schedule has {count}: give as many, or "
            "make it with another n_microbatches"
        )
    return microbatches


def _samples(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The first dimension that the tensors share, where a size of 1 is broadcast; 0 if they differ in it.
    Those in lists, which may have an entry for each sample, tell it where no others are there.
    """
    outside, within = first_sizes({**dict(enumerate(args)), **kwargs})
    if outside == {1} and within - {1}:
        return 0
    sizes = outside or within
    if len(sizes) > 1:
        sizes.discard(1)
    return 0 if len(sizes) > 1 else int(sizes.pop()) if sizes else 1


def arguments_of_microbatches(
    first: GraphStage, microbatches: Microbatches, *, train: bool
) -> tuple[list[dict[str, Tensor]], BatchSizes]:
    """See `arguments_of_batch`; microbatches that the user has made may each have sizes of their own."""
    arguments: list[dict[str, Tensor]] = []
    open_sizes: list[tuple[int, ...]] = []
    for number, part in enumerate(microbatches.parts):
        flat = first.signature.flatten(*part)
        arguments.append(first.accept(flat, number, train=train))
        sizes = first.routes.sizes_of(flat)
        first.routes.at(sizes, first.module.training)
        open_sizes.append(sizes)
    return arguments, BatchSizes(microbatches.samples, tuple(open_sizes))


def arguments_of_batch(
    first: GraphStage, batch: CutBatch, *, train: bool
) -> tuple[list[dict[str, Tensor]], BatchSizes]:
    """The tensors of each microbatch by name, and the sizes of each.

    Microbatches of equal sizes look alike, since all are views of one batch: one of each is checked.

    Args:
        first: the first stage.

    Raises:
        SignatureMismatch: what the pipeline was not cut for; nothing has been sent by then.
    """
    arguments: list[dict[str, Tensor]] = []
    samples: list[int] = []
    open_sizes: list[tuple[int, ...]] = []
    checked: dict[tuple[int, ...], tuple[int, ...]] = {}
    places: list[tuple[str, int]] | None = None
    for microbatch, (size, parts) in enumerate(zip(batch.sizes(), batch.parts(), strict=True)):
        if places is None or size not in checked:
            flat = first.signature.flatten(*batch.tree(parts))
            tensors = first.accept(flat, microbatch, train=train)
            sizes = first.routes.sizes_of(flat)
            first.routes.at(sizes, first.module.training)
            checked[size] = sizes
            places = _places(tensors, parts)
        else:
            tensors = {name: parts[place] for name, place in places}
        arguments.append(tensors)
        samples.append(size[0])
        open_sizes.append(checked[size])
    return arguments, BatchSizes(tuple(samples), tuple(open_sizes))


def _places(tensors: dict[str, Tensor], parts: Sequence[Any]) -> list[tuple[str, int]] | None:
    """The place of each tensor among the leaves; None where the model's own structures replace them."""
    at = {id(part): place for place, part in enumerate(parts)}
    if not all(id(value) in at for value in tensors.values()):
        return None
    return [(name, at[id(value)]) for name, value in tensors.items()]
