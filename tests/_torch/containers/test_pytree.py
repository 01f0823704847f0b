from __future__ import annotations

import copy
import pickle

import pytest
from torch.utils import _pytree as torch_pytree

from partita._torch.containers.pytree import flatten, flatten_up_to, flatten_with_path, tree_map, unflatten


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def test_unflatten_undoes_flatten_and_none_is_a_leaf() -> None:
    tree = {"x": [1, (2, None)], "y": {}}
    leaves, spec = flatten(tree)
    assert leaves == [1, 2, None]
    assert unflatten(leaves, spec) == tree


def test_structures_are_copied_and_pickled_without_a_warning() -> None:  # warnings are errors here
    tree = {"x": [1, (2, None)], "y": {}}
    leaves, spec = flatten(tree)
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other == spec
        assert unflatten(leaves, other) == tree


def test_paths_read_as_python_would_write_them() -> None:
    leaves, _ = flatten_with_path({"x": [1, (2,)]}, "kwargs")
    assert leaves == [("kwargs['x'][0]", 1), ("kwargs['x'][1][0]", 2)]


def test_tree_map_keeps_the_structure() -> None:
    assert tree_map(lambda n: n * 2, {"a": (1, [2])}) == {"a": (2, [4])}


def test_a_prefix_value_holds_for_the_whole_subtree() -> None:
    assert flatten_up_to(("a", {"k": "b"}), ([1, 2], {"k": (3, 4)}), _is_text) == ["a", "a", "b", "b"]
    assert flatten_up_to("a", [1, {"z": 2}], _is_text) == ["a", "a"]


def test_a_prefix_of_another_structure_is_refused() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the text is torch's own
        flatten_up_to(("a", "b"), (1, 2, 3), _is_text)


class Unnamed:
    """Registered as many libraries do it: without a word about what its parts are called."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts


torch_pytree.register_pytree_node(
    Unnamed, lambda value: (list(value.parts), None), lambda parts, _: Unnamed(*parts)
)


def test_the_parts_of_a_class_that_was_registered_without_keys_are_counted() -> None:
    leaves, spec = flatten_with_path({"x": Unnamed(1, [2, Unnamed()])}, "output")
    assert leaves == [("output['x'][0]", 1), ("output['x'][1][0]", 2)]
    assert spec == flatten({"x": Unnamed(1, [2, Unnamed()])})[1]
