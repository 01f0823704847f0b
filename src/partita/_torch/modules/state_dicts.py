"""State dicts with some values left out or others put in, and who has a part in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

__all__ = [
    "add_versions",
    "changes_state_dict",
    "empty_state_dict",
    "state_dict_hooks",
    "with_values",
    "without",
]

state_dict_hooks = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Where a module keeps the hooks of its state dict."""


def changes_state_dict(module: nn.Module) -> bool:
    """Whether user's code has a part in what ``state_dict()`` says of ``module`` itself: a hook, or a method
    of its class or its own.

    >>> changes_state_dict(nn.Linear(2, 2))
    False
    """
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    own = (module.state_dict, module._save_to_state_dict, *hooks)
    return any((getattr(code, "__module__", None) or "").partition(".")[0] != "torch" for code in own)


def without(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A state dict with the versions of its modules and without these names.

    >>> list(without(nn.Linear(2, 2).state_dict(), ["bias"]))
    ['weight']
    """
    items = [(name, value) for name, value in state.items() if name not in names]
    return _with_versions_of(state, items)


def with_values(state: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with the versions of its modules and with other values in place of its own, or added."""
    return _with_versions_of(state, {**state, **values}.items())


def empty_state_dict() -> OrderedDict[str, Any]:
    """A dict for state of which modules tell their versions."""
    empty: OrderedDict[str, Any] = OrderedDict()
    empty._metadata = OrderedDict()  # type: ignore[attr-defined]
    return empty


def add_versions(destination: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Add the versions of the modules of ``state`` to those of ``destination``, if it has any."""
    versions = getattr(destination, "_metadata", None)
    if versions is not None:
        versions.update(getattr(state, "_metadata", {}))


def _with_versions_of(state: Mapping[str, Any], items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    copied: OrderedDict[str, Any] = OrderedDict(items)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        copied._metadata = versions  # type: ignore[attr-defined]
    return copied
