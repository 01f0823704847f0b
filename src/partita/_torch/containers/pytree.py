"""Nested containers as leaves and a structure: typed faces of torch's pytree, which is private but is what fx
and export use. Objects of classes that it does not know are opened (see ``objects``), so that the tensors in
them are leaves too::

    {"x": [a, b]}  --flatten-->  [a, b]  +  the structure {"x": [*, *]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch.utils._pytree as torch_pytree

from partita._torch.containers.objects import open_objects

__all__ = [
    "TreeSpec",
    "flatten",
    "flatten_registered",
    "flatten_up_to",
    "flatten_with_path",
    "is_node",
    "node_children",
    "register_leaves",
    "same_structure",
    "tree_map",
    "unflatten",
]

TreeSpec: TypeAlias = torch_pytree.TreeSpec


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of `tree`, left to right, and its structure. None is a leaf.

    >>> flatten({"x": [1, None]})[0]
    [1, None]
    """
    return torch_pytree.tree_flatten(open_objects(tree))


def flatten_registered(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], TreeSpec]:
    """Like :func:`flatten`, but objects of classes that torch's pytree does not know are leaves, and so is
    what `is_leaf` says.

    >>> flatten_registered([{1: 2}, {3, 4}], lambda value: isinstance(value, dict))[0]
    [{1: 2}, {3, 4}]
    """
    return torch_pytree.tree_flatten(tree, is_leaf)


def flatten_with_path(tree: Any, root: str = "") -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Like :func:`flatten`, each leaf with the path to it as Python would write it after `root`.

    >>> flatten_with_path({"x": [1, 2]}, "kwargs")[0]
    [("kwargs['x'][0]", 1), ("kwargs['x'][1]", 2)]
    """
    opened = open_objects(tree)
    leaves, spec = torch_pytree.tree_flatten(opened)
    paths = [root + torch_pytree.keystr(path) for path in _paths(opened, ())]
    return list(zip(paths, leaves, strict=True)), spec


def _paths(tree: Any, path: tuple[torch_pytree.KeyEntry, ...]) -> Iterator[tuple[torch_pytree.KeyEntry, ...]]:
    """Yield the path to each leaf; the parts of a class that was registered without keys are numbered."""
    node = torch_pytree.SUPPORTED_NODES.get(torch_pytree._get_node_type(tree))
    if node is None:
        yield path
        return
    if node.flatten_with_keys_fn is not None:
        parts = node.flatten_with_keys_fn(tree)[0]
    else:
        parts = [
            (torch_pytree.SequenceKey(place), part) for place, part in enumerate(node.flatten_fn(tree)[0])
        ]
    for key, part in parts:
        yield from _paths(part, (*path, key))


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The tree of structure `spec` with these leaves.

    Raises:
        ValueError: not as many leaves as the structure has.
    """
    return torch_pytree.tree_unflatten(leaves, spec)


def same_structure(left: TreeSpec, right: TreeSpec) -> bool:
    """Whether two structures are the same. (By ``==`` alone ``{1: x}`` and ``{True: x}`` would be.)

    >>> same_structure(flatten({1: 0})[1], flatten({True: 0})[1])
    False
    """
    return bool(left == right and repr(left) == repr(right))


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of the same structure whose leaves are ``function(leaf)``.

    >>> tree_map(lambda n: n + 1, (1, [2]))
    (2, [3])
    """
    return torch_pytree.tree_map(function, open_objects(tree))


def flatten_up_to(prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """One value of `prefix` for each leaf of `tree`: a value that stands where `tree` has a subtree holds for
    all of it.

    >>> flatten_up_to({"x": "a", "y": "b"}, {"x": [1, 2], "y": 3}, lambda v: isinstance(v, str))
    ['a', 'a', 'b']

    Raises:
        ValueError: the structures differ above the values.
    """
    values: list[Any] = []

    def fill(value: Any, subtree: Any) -> None:
        values.extend([value] * len(flatten(subtree)[0]))

    torch_pytree.tree_map_(fill, prefix, tree, is_leaf=is_leaf)
    return values


def is_node(value: Any) -> bool:
    """Whether torch's pytree takes ``value`` apart: a container, or an object of a registered class.

    >>> is_node([1]), is_node("text")
    (True, False)
    """
    return not torch_pytree.tree_is_leaf(value)


def node_children(value: Any) -> tuple[list[Any], Any]:
    """Return the direct children of a value that `is_node`, and its context (the keys of a dict).

    >>> node_children({"x": [1]})
    ([[1]], ['x'])
    """
    node = torch_pytree.SUPPORTED_NODES[torch_pytree._get_node_type(value)]
    children, context = node.flatten_fn(value)
    return list(children), context


def register_leaves(
    kind: type, flatten_one: Callable[[Any], tuple[list[Any], Any]], unflatten_one: Callable[[Any, Any], Any]
) -> None:
    """Register a class of partita's own with torch's pytree.

    Args:
        flatten_one: from a value to its children and its context.
        unflatten_one: from these to a value.
    """
    torch_pytree.register_pytree_node(kind, flatten_one, unflatten_one)
