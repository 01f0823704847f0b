"""What a replicated module holds: looked at before each forward pass, since its parameters and buffers are
attributes that anybody may set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import is_

import torch
from torch import nn

from partita._torch.modules.contents import registries
from partita._torch.tensors.tensor_text import short_name, tensor_text

__all__ = ["ModuleWatch"]


class ModuleWatch:
    """The parameters and buffers of a module, as they are now and as they were when this was made.

    Args:
        reduced: by name, the parameters whose gradients are reduced.
        ignored: names of parameters and buffers that don't count.
        with_buffers: whether buffers count at all.

    Attributes:
        buffers: by name, as of the last `look`, in the order of the first.
    """

    def __init__(
        self,
        module: nn.Module,
        reduced: Mapping[str, nn.Parameter],
        ignored: Collection[str],
        *,
        with_buffers: bool,
    ) -> None:
        self._ignored = frozenset(ignored)
        self._with_buffers = with_buffers
        self._reduced = [(name, value, value.dtype, value.device) for name, value in reduced.items()]
        reduced_ids = set(map(id, reduced.values()))
        self._frozen = [
            (name, value)
            for name, value in module.named_parameters()
            if id(value) not in reduced_ids and name not in self._ignored
        ]
        self._known_ids = reduced_ids | {id(value) for _, value in self._frozen}
        self._kinds: dict[str, str] | None = None
        self._read(module)
        self._kinds = {name: _kind(buffer) for name, buffer in self.buffers.items()}

    def look(self, module: nn.Module) -> bool:
        """Look whether something has been replaced, and take it in. Cheap where nothing has.

        Returns:
            Whether there is anything new.
        """
        if all(_same(there, before) for there, before in self._seen):
            return False
        self._read(module)
        return True

    def fault(self) -> str | None:
        """Return why gradients would not be reduced, or buffers not be sent; None where all is well."""
        for name, parameter, dtype, device in self._reduced:
            if parameter.dtype is not dtype or parameter.device != device:
                return (
                    f"parameter {name!r} was {short_name(dtype)} on {device} when the module was replicated, "
                    f"and is {short_name(parameter.dtype)} on {parameter.device} now"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                return (
                    f"parameter {name!r} was frozen when the module was replicated, and is trained now, so "
                    "its gradient would not be reduced"
                )
        for name, parameter in self._added:
            if parameter.requires_grad:
                return (
                    f"parameter {name!r} was put into the module after it had been replicated, so its "
                    "gradient would not be reduced"
                )
        return self._changed_buffer

    def _read(self, module: nn.Module) -> None:
        """Look through the whole module."""
        self._seen = [(there, tuple(there.values())) for there in registries(module)]
        self._added = [
            (name, value)
            for name, value in module.named_parameters()
            if isinstance(value, nn.Parameter)  # torch.func.functional_call puts other tensors there
            and id(value) not in self._known_ids
            and name not in self._ignored
        ]
        named = module.named_buffers() if self._with_buffers else ()
        buffers: dict[str, torch.Tensor] = {
            name: buffer for name, buffer in named if name not in self._ignored
        }
        order = {name: place for place, name in enumerate(self._kinds or ())}
        self.buffers = dict(sorted(buffers.items(), key=lambda item: order.get(item[0], len(order))))
        self._changed_buffer = None if self._kinds is None else self._difference(self._kinds)

    def _difference(self, kinds: Mapping[str, str]) -> str | None:
        """Between the buffers and their ``kinds`` of before."""
        for name in [*kinds, *self.buffers]:
            there = self.buffers.get(name)
            before, now = kinds.get(name, "not there"), "not there" if there is None else _kind(there)
            if before != now:
                return (
                    f"buffer {name!r} was {before} when the module was replicated, and is {now} now (a "
                    f"buffer that has to change so can be left out: ignored=[{name!r}], or "
                    "broadcast_buffers=False)"
                )
        return None


def _kind(tensor: torch.Tensor) -> str:
    """What has to stay as it is for a tensor to travel with others, in words."""
    return f"{tensor_text(tensor)} on {tensor.device}"


def _same(there: Mapping[str, object], before: tuple[object, ...]) -> bool:
    return len(there) == len(before) and all(map(is_, there.values(), before))
