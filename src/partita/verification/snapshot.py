"""The state of a subject by name: parameters, buffers, and plain attributes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

from partita.verification.subject import Subject

__all__ = ["NamedTensor", "named_tensors", "named_values"]

_PLAIN = (bool, int, float, complex, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}


@dataclass(frozen=True)
class NamedTensor:
    """One named tensor of a subject.

    Attributes:
        kind: how it is registered; an attribute is a tensor that a module holds without registering it.
        tensor: the tensor itself, not a copy.
        made: whether a run put it in the place of another one.
    """

    kind: Literal["parameter", "buffer", "attribute"]
    tensor: torch.Tensor
    made: bool = False


def named_tensors(subject: Subject) -> dict[str, NamedTensor]:
    """Every tensor that the subject holds, by qualified name; a tied one comes under each of its names."""
    found: dict[str, NamedTensor] = {}
    for prefix, root in subject.roots:
        if isinstance(root, torch.Tensor):
            kind = "parameter" if isinstance(root, torch.nn.Parameter) else "attribute"
            found[prefix] = NamedTensor(kind, root)  # type: ignore[arg-type]
            continue
        if isinstance(root, torch.Generator):
            continue
        for name, parameter in root.named_parameters(prefix, remove_duplicate=False):
            found[name] = NamedTensor("parameter", parameter)
        for name, buffer in root.named_buffers(prefix, remove_duplicate=False):
            found[name] = NamedTensor("buffer", buffer)
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    found[_join(path, name)] = NamedTensor("attribute", value)
    return found


def named_values(subject: Subject) -> dict[str, Any]:
    """What the subject holds besides tensors, by name: counters, flags, ``training``, random generators.

    These are every public attribute of a module that is a number, a string or None, and a digest of the state
    of every `torch.Generator`.
    """
    found: dict[str, Any] = {}
    for prefix, root in subject.roots:
        if isinstance(root, torch.Generator):
            found[prefix] = _digest(root)
        if not isinstance(root, torch.nn.Module):
            continue
        for path, module in root.named_modules(prefix=prefix, remove_duplicate=False):
            for name, value in vars(module).items():
                if isinstance(value, torch.Generator):
                    found[_join(path, name)] = _digest(value)
                elif isinstance(value, _PLAIN) and not name.startswith("_") and name not in _OF_EVERY_MODULE:
                    found[_join(path, name)] = value
    return found


def _digest(generator: torch.Generator) -> str:
    state = hashlib.sha256(bytes(generator.get_state().tolist())).hexdigest()
    return f"generator in state {state[:16]}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
