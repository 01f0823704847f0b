"""Which module of the model a node was made in."""

from __future__ import annotations

from torch.fx import Node

__all__ = ["module_calls", "module_path", "module_paths"]


def module_paths(node: Node) -> list[str]:
    """Qualified names of the modules whose ``forward`` was running when the node was made, outermost first.

    The model itself is the empty string. Empty where nothing is known.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return [_plain(str(entry[0])) for entry in stack.values()]


def module_calls(node: Node) -> list[tuple[str, int]]:
    """The same with the number of the call: 0 for the first time that the module runs, 1 for the second."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(_plain(str(entry[0])), _number(str(key))) for key, entry in stack.items()]


def module_path(node: Node) -> str:
    """The qualified name of the innermost of them."""
    paths = module_paths(node)
    return paths[-1] if paths else ""


def _number(key: str) -> int:
    # Tracers tell calls of one module apart by their keys: L__self___a, L__self___a@1.
    number = key.rpartition("@")[2] if "@" in key else "0"
    return int(number) if number.isdigit() else 0


def _plain(path: str) -> str:
    # Older tracers write L['self'].layers.0; a module that is called again may get @1 and so on.
    return path.removeprefix("L['self']").removeprefix(".").partition("@")[0]
