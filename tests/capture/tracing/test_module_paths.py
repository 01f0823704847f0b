from __future__ import annotations

import pytest
from torch.fx import Graph, Node

from partita.capture.tracing.module_paths import module_path, module_paths


def _node(*paths: str) -> Node:
    node = Graph().placeholder("x")
    if paths:
        node.meta["nn_module_stack"] = {str(number): (path, "Linear") for number, path in enumerate(paths)}
    return node


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ((), []),
        (("", "blocks.0"), ["", "blocks.0"]),
        (("L['self']", "L['self'].blocks.0"), ["", "blocks.0"]),
        (("", "a@1"), ["", "a"]),
        (("", "a._orig_mod"), ["", "a", "a._orig_mod"]),
        (("", "a", "a._orig_mod"), ["", "a", "a._orig_mod"]),
    ],
    ids=["unknown", "plain", "strict mode", "called again", "compiled", "compiled and traced"],
)
def test_paths_are_plain_names_of_modules(paths: tuple[str, ...], expected: list[str]) -> None:
    node = _node(*paths)
    assert module_paths(node) == expected
    assert module_path(node) == (expected[-1] if expected else "")
