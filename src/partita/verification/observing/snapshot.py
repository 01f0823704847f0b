"""The state of a subject by name: parameters, buffers, and other attributes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

from partita.verification.observing.subject import Subject

__all__ = ["NamedTensor", "named_tensors", "named_values"]

_NUMBERS_AND_TEXT = (bool, int, float, complex, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}


@dataclass(frozen=True)
class NamedTensor:
    """One named tensor of a subject.

    Attributes:
        kind: how it is registered; an attribute is a tensor that a module holds without registering it.
        tensor: the tensor itself, not a copy.
        replaced: whether a run assigned it in the place of another tensor.
    """

    kind: Literal["parameter", "buffer", "attribute"]
    tensor: torch.Tensor
    replaced: bool = False


def named_tensors(subject: Subject) -> dict[str, NamedTensor]:
    """Return every tensor that the subject holds, by qualified name; a tied one comes under each name."""
    by_name: dict[str, NamedTensor] = {}
    for prefix, root in subject.roots:
        if isinstance(root, torch.Tensor):
            kind = "parameter" if isinstance(root, torch.nn.Parameter) else "attribute"
            by_name[prefix] = NamedTensor(kind, root)  # type: ignore[arg-type]
            continue
        if isinstance(root, torch.Generator):
            continue
        for name, parameter in root.named_parameters(prefix, remove_duplicate=False):
            by_name[name] = NamedTensor("parameter", parameter)
        for name, buffer in root.named_buffers(prefix, remove_duplicate=False):
            by_name[name] = NamedTensor("buffer", buffer)
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    by_name[_join(path, name)] = NamedTensor("attribute", value)
    return by_name


def named_values(subject: Subject) -> dict[str, Any]:
    """Return the state besides tensors, by name: counters, flags, ``training``, random generators.

    That is every public attribute of a module that is a number, a string or None, and a digest of the state
    of every `torch.Generator`.
    """
    by_name: dict[str, Any] = {}
    for prefix, root in subject.roots:
        if isinstance(root, torch.Generator):
            by_name[prefix] = _digest(root)
        if not isinstance(root, torch.nn.Module):
            continue
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for name, value in vars(module).items():
                if isinstance(value, torch.Generator):
                    by_name[_join(path, name)] = _digest(value)
                elif (
                    isinstance(value, _NUMBERS_AND_TEXT)
                    and not name.startswith("_")
                    and name not in _OF_EVERY_MODULE
                ):
                    by_name[_join(path, name)] = value
    return by_name


def _digest(generator: torch.Generator) -> str:
    state = hashlib.sha256(bytes(generator.get_state().tolist())).hexdigest()
    return f"generator in state {state[:16]}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
