"""Which module of the model a node was made in."""

from __future__ import annotations

from torch.fx import Node

__all__ = ["module_path", "module_paths"]


def module_paths(node: Node) -> list[str]:
    """Qualified names of the modules whose ``forward`` was running when the node was made, outermost first.

    The model itself is the empty string. Empty where nothing is known.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return [_plain(str(entry[0])) for entry in stack.values()]


def module_path(node: Node) -> str:
    """The qualified name of the innermost of them."""
    paths = module_paths(node)
    return paths[-1] if paths else ""


def _plain(path: str) -> str:
    # Older tracers write L['self'].layers.0; a module that is called again may get @1 and so on.
    return path.removeprefix("L['self']").removeprefix(".").partition("@")[0]
