"""Lists with an entry for each sample: boxes of each picture, texts, dicts of labels.

A batch is cut along dimensions of its tensors. Cut so, a microbatch would get the entries of all samples,
each with a part of its rows, and a model that goes over predictions and entries side by side takes those of
other samples without a word. Whether a list of as many entries as there are samples is such a list, or one of
values that each hold the whole batch, only the user knows. A tuple of tensors that each have the batch is
taken for a group of values (the states of an LSTM), and one of plain numbers for a setting (a height and a
width).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from partita._torch.containers.pytree import flatten
from partita.errors import MicrobatchError
from partita.listing import listed

__all__ = ["BY_YOURSELF", "check_counted", "check_lists", "check_output", "first_sizes", "has_lists"]

BY_YOURSELF = "cut the batch by yourself: arg_mbs=[...], kwarg_mbs=[...], target_mbs=[...]"
"""What to do with a list that has an entry for each sample."""


def check_lists(tree: Any, path: str, samples: int, specs: Any = None, *, specified: bool = True) -> None:
    """Refuse lists and tuples that may have an entry for each sample.

    Args:
        tree: an argument, or a target.
        path: what messages call it.
        samples: how many the batch has.
        specs: of the structure of the argument, or None; where there is one, the user has said what it is.
        specified: whether the user can say so.

    Raises:
        MicrobatchError: names the list.

    >>> check_lists({"boxes": [1, 2, 3]}, "target", 4)
    """
    for where, entries in _lists(tree, path, specs):
        if len(entries) == samples and not _is_one_value(entries, samples):
            length, kind = len(entries), type(entries).__name__
            otherwise = (
                "else give it a spec: TensorChunkSpec(0) where each of its tensors has the whole batch, "
                "Replicate() where every microbatch gets it whole"
                if specified
                else "where each of its tensors has the whole batch, give a dict of them"
            )
            raise MicrobatchError(
                f"{where} is a {kind} of {length}, and the batch has {samples} samples: if it has an entry "
                f"for each, {BY_YOURSELF}; {otherwise}"
            )


def check_counted(
    args: Sequence[Any], kwargs: Mapping[str, Any], specs: Any, counted: Sequence[Tensor]
) -> None:
    """Refuse a list of tensors where nothing outside of lists says how many samples there are: it may have an
    entry for each, of which every microbatch would get a part.

    Args:
        specs: those of ``args``, and those of ``kwargs``; None where there are none.
        counted: the tensors that are cut, by whose sizes samples are counted.

    Raises:
        MicrobatchError: names the list.
    """
    of_args, of_kwargs = specs
    named = {f"args[{number}]": (value, _of(of_args, number)) for number, value in enumerate(args)}
    named |= {f"kwargs[{name!r}]": (value, _of(of_kwargs, name)) for name, value in kwargs.items()}
    every = [it for path, (tree, spec) in named.items() for it in _lists(tree, path, spec)]
    lists = [(path, entries) for path, entries in every if type(entries) is list and len(entries) > 1]
    within = {id(leaf) for _, entries in lists for leaf in flatten(entries)[0] if isinstance(leaf, Tensor)}
    if counted and all(id(tensor) in within for tensor in counted):
        where, entries = lists[0]
        raise MicrobatchError(
            f"{where} is a list of {len(entries)}, and nothing outside of lists says how many samples there "
            f"are: if it has an entry for each, {BY_YOURSELF}; else give it a spec: TensorChunkSpec(0) where "
            "each of its tensors has the whole batch"
        )


def check_output(output: Any, samples: int = 0) -> None:
    """Refuse to merge an output that is a list of dicts with the same keys, as detectors return it, by its
    tensors: boxes of the first picture of each microbatch would become those of one.

    Args:
        samples: how many the microbatch has, as many as such a list; 0 where this is not known.

    Raises:
        MicrobatchError: says which specs there are to choose from.

    >>> check_output({"layers": [{"boxes": 1}, {"boxes": 2}]})
    >>> check_output([{"boxes": 1}, {"boxes": 2}], 4)
    """
    if type(output) is not list or samples not in (0, len(output)):
        return
    if not all(isinstance(entry, Mapping) for entry in output):
        return
    keys = list(output[0]) if output else []
    if keys and all(list(entry) == keys for entry in output):
        raise MicrobatchError(
            f"the model returns a list of {len(output)} dicts (of {listed(keys)}), which may be one for each "
            "sample: give the schedule an output_merge_spec, TensorChunkSpec(0) where each tensor has the "
            "whole microbatch, or Reduce(lambda parts, value: [*parts, value], []), which keeps those of the "
            "microbatches apart; or step(..., return_outputs=False)"
        )


def first_sizes(tree: Any) -> tuple[set[int], set[int]]:
    """The first dimensions of tensors outside of lists and tuples, and of those in them, which may be rows of
    one sample.

    >>> import torch
    >>> first_sizes({"x": torch.zeros(4, 2), "boxes": [torch.zeros(3, 4)] * 4})
    ({4}, {3})
    """
    if isinstance(tree, Mapping):
        sizes = [first_sizes(value) for value in tree.values()]
        return set().union(*(outside for outside, _ in sizes)), set().union(*(within for _, within in sizes))
    own = {leaf.shape[0] for leaf in flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.dim()}
    return (set(), own) if type(tree) in (list, tuple) else (own, set())


def has_lists(tree: Any) -> bool:
    """Whether there are lists or tuples in a tuple or dict, at any depth of these.

    >>> [has_lists(tree) for tree in ((1, 2), (1, {"boxes": [2]}))]
    [False, True]
    """
    values = tree.values() if isinstance(tree, Mapping) else tree
    return any(
        type(value) in (list, tuple) or (isinstance(value, Mapping) and has_lists(value)) for value in values
    )


def _is_one_value(entries: Sequence[Any], samples: int) -> bool:
    """Whether it is no list of what belongs to each sample, by its entries."""
    if all(entry is None or isinstance(entry, (bool, int, float)) for entry in entries):
        return True
    return type(entries) is tuple and all(
        isinstance(entry, Tensor) and entry.dim() > 0 and entry.shape[0] == samples for entry in entries
    )


def _lists(tree: Any, path: str, specs: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """Each list and tuple without a spec, with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _lists(value, f"{path}[{key!r}]", _of(specs, key))
    elif type(tree) in (list, tuple):
        if specs is None:
            yield path, tree
        for number, value in enumerate(tree):
            yield from _lists(value, f"{path}[{number}]", _of(specs, number))


def _of(specs: Any, key: Any) -> Any:
    """The specs of an entry: those of a structure, or the one that holds for all of it."""
    if isinstance(specs, Mapping):
        return specs.get(key)
    return specs[key] if isinstance(specs, (list, tuple)) else specs
