"""Buffers that a microbatch saves for its backward pass and a later one writes to.

Uncut, each microbatch goes back before the next one comes, and finds the buffer as it left it. With several
in flight it does not, and autograd refuses::

    microbatch 0   F (writes 0, saves the buffer)                  B (needs 0, finds 1)
    microbatch 1                                  F (writes 1)

So a stage whose buffers are both written and saved keeps a copy of what is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from partita._torch.autograd.engine import AsSaved
from partita._torch.tensors.storage import storage_key
from partita._torch.tensors.versions import times_written
from partita.pipelining.interface.layout import copied

__all__ = ["SavedBuffers"]


class SavedBuffers:
    """Copies buffers that autograd saves, where the first forward pass in a mode has shown a need for it.

    Args:
        module: the owner of the buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._needed: dict[bool, bool] = {}

    @property
    def idle(self) -> bool:
        """Whether `kept` has nothing to do: no saved buffer is written to in this mode, or none is saved."""
        return not torch.is_grad_enabled() or self._needed.get(self._module.training) is False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run the forward pass of one microbatch so that autograd saves copies of buffers."""
        training = self._module.training
        if self.idle:
            yield
            return
        before = dict(self._module.named_buffers())
        if not before:
            self._needed[training] = False
            yield
            return
        versions = {name: times_written(buffer) for name, buffer in before.items()}
        keys = {storage_key(buffer) for buffer in before.values()}
        saved: dict[int, list[list[Tensor]]] = {}

        def pack(tensor: Tensor) -> list[Tensor]:
            key = storage_key(tensor)
            packed = AsSaved.pack(copied(tensor.detach()) if key in keys else tensor)
            saved.setdefault(key, []).append(packed)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, AsSaved()):
            yield
        # What has become a buffer meanwhile was saved as it is.
        after = {name: storage_key(buffer) for name, buffer in self._module.named_buffers()}
        for key in set(after.values()) - keys:
            for packed in saved.get(key, ()):
                packed[:] = [copied(tensor.detach()) for tensor in packed]
        if training not in self._needed:
            self._needed[training] = any(
                times_written(buffer) != versions[name]
                and {storage_key(buffer), after.get(name)}.intersection(saved)
                for name, buffer in before.items()
            )
