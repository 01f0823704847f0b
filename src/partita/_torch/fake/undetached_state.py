"""State dicts of the tensors themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from partita._torch.modules.contents import named_state
from partita._torch.modules.state_dicts import empty_state_dict, with_values
from partita._torch.tensors.storage import is_same_view, storage_key

__all__ = ["tensors_in_state_dict"]


def tensors_in_state_dict(module: nn.Module, prefix: str = "", *, nested: bool = False) -> Mapping[str, Any]:
    """What ``state_dict()`` says, with the tensors themselves, not detached, even where an override takes no
    ``keep_vars``.

    Args:
        nested: what it says when it is asked for one part of a larger module, into whose dict it writes.

    >>> layer = nn.Linear(2, 2)
    >>> tensors_in_state_dict(layer)["weight"] is layer.weight
    True
    """
    options: dict[str, Any] = {"prefix": prefix} if prefix or nested else {}
    if nested:
        options["destination"] = empty_state_dict()
    if _takes(module.state_dict, "keep_vars"):
        options["keep_vars"] = True
    state: Mapping[str, Any] = module.state_dict(**options)
    state = options.get("destination", state)
    if "keep_vars" in options:
        return state
    own: dict[int, list[Tensor]] = {}
    for _, tensor in named_state(module):
        own.setdefault(storage_key(tensor), []).append(tensor)
    return with_values(state, {name: _itself(value, own) for name, value in state.items()})


def _itself(value: Any, own: Mapping[int, list[Tensor]]) -> Any:
    """The one of these tensors, listed by storage, of which ``value`` is a view of all; else ``value``."""
    if not isinstance(value, Tensor):
        return value
    return next((tensor for tensor in own.get(storage_key(value), ()) if is_same_view(tensor, value)), value)


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
