"""How FSDP tells Dynamo which modules it manages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

__all__ = [
    "fsdp_wrapped_name",
    "ignored_by_wrappers",
    "is_border",
    "is_wrapper",
    "mark",
    "mark_of",
    "unwrapped_name",
]

_AROUND = ("_checkpoint_wrapped_module", "_orig_mod")
"""The name that a wrapper of activation checkpointing, or of ``torch.compile``, has for what it wraps."""


def mark(module: nn.Module, *, use_orig_params: bool) -> None:
    """Mark a module as managed by FSDP: Dynamo makes its parameters inputs of the graph.

    Written past ``nn.Module.__setattr__``, which a module may have overridden.
    """
    marks: dict[str, Any] = {"_is_fsdp_managed_module": True, "_fsdp_use_orig_params": use_orig_params}
    vars(module).update(marks)


def mark_of(module: nn.Module) -> bool | None:
    """The ``use_orig_params`` of a managed module; None for one that is not marked."""
    if not getattr(module, "_is_fsdp_managed_module", False):
        return None
    return bool(getattr(module, "_fsdp_use_orig_params", False))


def is_wrapper(module: nn.Module) -> bool:
    """Whether this is the wrapper of FSDP1, which Dynamo never sees."""
    return isinstance(module, FullyShardedDataParallel)


def is_border(module: nn.Module) -> bool:
    """Whether FSDP gathers parameters before this module runs, and frees them afterwards."""
    return isinstance(module, (FullyShardedDataParallel, FSDPModule))


def ignored_by_wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that FSDP1's wrappers in this tree were told to ignore, with all inside them."""
    for inner in module.modules():
        if is_wrapper(inner):
            for ignored in getattr(inner, "_ignored_modules", ()):
                yield from ignored.modules()


def fsdp_wrapped_name(name: str) -> str:
    """The name that a module had before FSDP1 put wrappers into its path.

    >>> fsdp_wrapped_name("layers.0._fsdp_wrapped_module.mlp")
    'layers.0.mlp'
    """
    return ".".join(atom for atom in name.split(".") if atom != "_fsdp_wrapped_module")


def unwrapped_name(name: str) -> str:
    """The same, without the wrappers of ``torch.compile`` and of activation checkpointing around the module:
    a name that a model has with them and without.

    >>> unwrapped_name("layers.0._checkpoint_wrapped_module")
    'layers.0'
    """
    atoms = fsdp_wrapped_name(name).split(".")
    while atoms and atoms[-1] in _AROUND:
        atoms.pop()
    return ".".join(atoms)
