"""The modules of the model that a node comes from."""

from __future__ import annotations

from torch.fx import Node

__all__ = ["module_calls", "module_path", "module_paths"]

_COMPILED = "._orig_mod"


def module_paths(node: Node) -> list[str]:
    """Return the names of the modules in whose ``forward`` the node was traced, outermost first.

    The model itself is the empty string. The list is empty where the node has no such metadata.
    """
    return [path for path, _ in module_calls(node)]


def module_calls(node: Node) -> list[tuple[str, int]]:
    """Return the same with the number of the call: 0 for a module's first call, 1 for its second.

    A submodule that ``torch.compile`` returned has the name of its place too, though only what is inside of
    it is traced.
    """
    stack = node.meta.get("nn_module_stack") or {}
    calls: list[tuple[str, int]] = []
    for key, entry in stack.items():
        path, number = _qualified_name(str(entry[0])), _number(str(key))
        place = path.removesuffix(_COMPILED)
        if place != path and (not calls or calls[-1][0] != place):
            calls.append((place, number))
        calls.append((path, number))
    return calls


def module_path(node: Node) -> str:
    """Return the name of the innermost of these modules, or the empty string."""
    paths = module_paths(node)
    return paths[-1] if paths else ""


def _number(key: str) -> int:
    # Tracers tell calls of one module apart by their keys: L__self___a, L__self___a@1.
    number = key.rpartition("@")[2] if "@" in key else "0"
    return int(number) if number.isdigit() else 0


def _qualified_name(path: str) -> str:
    # Older tracers write L['self'].layers.0; a module that is called again may get @1 and so on.
    return path.removeprefix("L['self']").removeprefix(".").partition("@")[0]
