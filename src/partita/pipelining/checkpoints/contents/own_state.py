"""What only a module's own ``load_state_dict()`` can put back: extra state, and tensors that its
``state_dict()`` computes (merged or converted weights, a version, the scale of a quantised layer), which are
no memory of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from partita._torch.modules.contents import is_persistent, named_state
from partita._torch.modules.state_dicts import with_values, without
from partita._torch.tensors.storage import has_memory, storage_key
from partita.errors import CheckpointError
from partita.pipelining.blocks.stage_module import named_tensors
from partita.pipelining.stages.placing.state_of_stage import (
    StateValue,
    by_identity,
    clean_name,
    is_opaque,
    state_of_stage,
)

__all__ = ["LoadableState", "loadable_state"]


@dataclass(frozen=True)
class LoadableState:
    """The state of a module, to read a checkpoint into.

    Attributes:
        module: whose it is.
        values: of its state dict; a copy in place of each tensor that it computes.
        computed: these copies, by name.
        leaves_out: whether the state dict leaves out some of the module's parameters or persistent buffers,
            of which only the module knows what becomes.
    """

    module: nn.Module
    values: tuple[StateValue, ...]
    computed: Mapping[str, Tensor]
    leaves_out: bool

    @property
    def _only_by_itself(self) -> bool:
        """Whether there is anything that only the module can put back."""
        return bool(self.computed) or self.leaves_out or any(map(is_opaque, self.values))

    def put(
        self, extra_state: Mapping[str, Any], *, missing: Collection[str] = (), strict: bool = True
    ) -> None:
        """Let the module load its tensors as they are by now, the copies, and extra state, by name.

        Args:
            missing: names of copies that have no new value.
            strict: of ``load_state_dict``.

        Raises:
            CheckpointError: it does not take them.
        """
        if not (extra_state or self.computed or self.leaves_out):
            return
        own = {**self.computed, **extra_state}
        state: Mapping[str, Any] = self.module.state_dict()
        state = without(state, [name for name in state if clean_name(name) in missing])
        own = {name: own[clean_name(name)] for name in state if clean_name(name) in own}
        try:
            self.module.load_state_dict(with_values(state, own), strict=strict)
        except RuntimeError as error:
            raise CheckpointError(
                "the model's own load_state_dict() does not take back what its state_dict() says: a hook of "
                "it, or an override, leaves values out, renames or computes them. Give the model one that "
                "undoes that (register_load_state_dict_pre_hook), or pass strict=False to leave what is "
                f"missing as it is. {error}"
            ) from error

    def keep(self) -> Callable[[], None]:
        """Return a function that puts back what only the module itself can, as it is now. Not the tensors
        that are values of the state dict: who writes to them keeps them.
        """
        if not self._only_by_itself:
            return lambda: None
        extra_state = {value.names[0]: value.value for value in self.values if is_opaque(value)}
        saved = _storages(self.values)
        kept = [
            (tensor, _copy(tensor))
            for _, tensor in named_state(self.module)
            if storage_key(tensor) not in saved
        ]
        computed = {name: copy.clone() for name, copy in self.computed.items()}

        def restore() -> None:
            try:
                replace(self, computed=computed).put(extra_state, strict=False)
            finally:
                for tensor, copy in kept:
                    tensor.detach().copy_(copy)

        return restore


def loadable_state(module: nn.Module) -> LoadableState:
    """The state of a module, to read a checkpoint into."""
    # First, since FSDP's hook of it puts shards in place of whole tensors.
    state = by_identity(state_of_stage(module))
    own = {storage_key(tensor) for _, tensor in (*named_state(module), *named_tensors(module))}
    values: list[StateValue] = []
    computed: dict[str, Tensor] = {}
    for value in state:
        if not is_opaque(value) and has_memory(value.value) and storage_key(value.value) not in own:
            copy = computed[value.names[0]] = value.value.detach().clone()
            values.append(StateValue(copy, value.names))
        else:
            values.append(value)
    saved = _storages(values)
    leaves_out = any(
        storage_key(tensor) not in saved and is_persistent(module, name)
        for name, tensor in named_state(module)
    )
    return LoadableState(module, tuple(values), computed, leaves_out)


def _storages(values: Iterable[StateValue]) -> set[int]:
    return {storage_key(value.value) for value in values if isinstance(value.value, Tensor)}


def _copy(tensor: Tensor) -> Tensor:
    """On the CPU, unless it is sharded."""
    tensor = tensor.detach()
    return tensor.clone() if isinstance(tensor, DTensor) else tensor.to("cpu", copy=True)
