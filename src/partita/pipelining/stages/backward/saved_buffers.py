"""Buffers and parameters that a microbatch saves for its backward pass and a later one writes to.

Uncut, each microbatch goes back before the next one comes, and finds the buffer as it left it. With several
in flight it does not, and autograd refuses::

    microbatch 0   F (writes 0, saves the buffer)                  B (needs 0, finds 1)
    microbatch 1                                  F (writes 1)

So a stage whose buffers are both written and saved keeps a copy of what is saved; likewise of parameters,
which some models clamp or norm at the beginning of ``forward`` (the layers of EDM2, critics of a WGAN).

A graph may write to a buffer after autograd has saved it, where the model assigns another one: hooks keep it
as it is saved; so does a compiled module, which writes at its end. The model's own code may refuse hooks
(``torch.func.grad`` does), and autograd refuses what it writes to after saving it, as uncut: there the
copies are made once the pass is over.

A graph that writes in one branch on data only may do so in any later pass, so that the first shows nothing.
So may the model's own code, and through ``.data`` without being counted: of its buffers, and of tensors in
attributes, all that is saved is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from partita._torch.autograd.engine import AsSaved, hook_saved
from partita._torch.autograd.running_pass import takes_gradient
from partita._torch.containers.pytree import flatten
from partita._torch.fake.ghosts import undisturbed
from partita._torch.modules.compiled import is_compiled
from partita._torch.tensors.storage import same_bits, storage_key
from partita._torch.tensors.tensor_text import short_name
from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.pipelining.interface.layout import copied
from partita.pipelining.interface.two_modes import graphs_in, writes_in_a_branch
from partita.pipelining.stages.backward.autograd_cut import AutogradGraph

__all__ = ["SavedBuffers"]

_LARGE = 2**20
"""Bytes from which on looking for an equal copy is worth the wait for the device."""


class SavedBuffers:
    """Copies buffers and parameters that autograd saves, where the first forward pass in a mode has shown a
    need for it.

    Args:
        module: the owner of the buffers and parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._needed: dict[bool, bool] = {}
        self._is_own_code: dict[bool, bool] = {}
        self._copies: WeakValueDictionary[tuple[Any, ...], Tensor] = WeakValueDictionary()

    def __reduce__(self) -> tuple[type[SavedBuffers], tuple[nn.Module]]:
        """A pickled one learns anew what is needed: it has no microbatches under way."""
        return type(self), (self._module,)

    @property
    def idle(self) -> bool:
        """Whether `kept` has nothing to do: what is written to in this mode is not saved."""
        return not torch.is_grad_enabled() or self._needed.get(self._module.training) is False

    @contextmanager
    def kept(self, wrapper: nn.Module | None = None) -> Iterator[Callable[[Any], None]]:
        """Run the forward pass of one microbatch so that autograd saves copies of what forward writes to.

        Args:
            wrapper: what is called in place of the module, and calls it.

        Yields:
            What to call with the result.
        """
        training = self._module.training
        results: list[Any] = []
        if self.idle:
            yield results.append
            return
        before = dict(self._module.named_buffers())
        parameters = [(parameter, times_written(parameter)) for parameter in self._module.parameters()]
        versions = {name: times_written(buffer) for name, buffer in before.items()}
        keys = {storage_key(buffer) for buffer in before.values()}
        if training not in self._is_own_code:
            self._is_own_code[training] = _is_own_code(self._module if wrapper is None else wrapper)
        if self._is_own_code[training]:
            keys |= self._attribute_keys()
        if self._is_own_code[training] or (not before and training not in self._needed):
            # The latter: few graphs write to parameters, and some call what refuses hooks.
            yield results.append
            wanted = keys | _written_keys(parameters) | self._written_buffers(before, versions)
            is_saved = bool(wanted) and self._copied_since(results, wanted)
            self._needed.setdefault(training, is_saved)
            return
        saved: dict[int, list[list[Any]]] = {}

        def pack(tensor: Tensor) -> list[Any]:
            with undisturbed():
                key = storage_key(tensor)
                packed = _AsUsed.pack(copied(tensor.detach()) if key in keys else tensor)
            saved.setdefault(key, []).append(packed)
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, _AsUsed()):
            yield results.append
        # What has become a buffer meanwhile was saved as it is; so were parameters, few of which are written.
        after = {name: storage_key(buffer) for name, buffer in self._module.named_buffers()}
        written = _written_keys(parameters)
        for key in (set(after.values()) - keys) | written:
            for packed in saved.get(key, ()):
                if packed and _AsUsed.is_unwritten(packed):
                    packed[:] = _AsUsed.pack(copied(packed[0].detach()))
        if training not in self._needed:
            written |= self._written_buffers(before, versions)
            self._needed[training] = not written.isdisjoint(saved) or writes_in_a_branch(self._module)

    def _written_buffers(self, before: Mapping[str, Tensor], versions: Mapping[str, int]) -> set[int]:
        """The storages of buffers that were written to, and of what has taken their places."""
        after = dict(self._module.named_buffers())
        names = [name for name, buffer in before.items() if times_written(buffer) != versions[name]]
        buffers = [buffers[name] for name in names for buffers in (before, after) if name in buffers]
        return {storage_key(buffer) for buffer in buffers}

    def _attribute_keys(self) -> set[int]:
        """The storages of tensors that the modules of the model's own code keep in plain attributes."""
        root: nn.Module = getattr(self._module, "code_that_runs", self._module)
        values = (value for module in root.modules() for value in vars(module).values())
        return {storage_key(value) for value in values if isinstance(value, Tensor)}

    def _copied_since(self, results: Sequence[Any], keys: Set[int]) -> bool:
        """Let the graph of a pass keep copies of what lies in some storages. Return whether it saved any."""

        def is_wanted(tensor: Tensor) -> bool:
            return storage_key(tensor) in keys

        def pack(tensor: Tensor) -> list[Any]:
            return _AsUsed.pack(self._copy(tensor))

        with undisturbed():
            roots = [it for it in flatten(results)[0] if isinstance(it, Tensor) and takes_gradient(it)]
            hooked = [
                hook_saved(node, is_wanted, pack, _AsUsed()) for node, _ in AutogradGraph.of(roots).order
            ]
        return any(hooked)

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy of what is saved. Passes that have saved the same bits share a large one: quantised weights
        may lie in buffers.
        """
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.nbytes < _LARGE:
            return copied(tensor.detach())
        place = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        last = self._copies.get(place)
        if last is None or not same_bits(last, tensor):
            self._copies[place] = last = copied(tensor.detach())
        return last


def _is_own_code(module: nn.Module) -> bool:
    return next(graphs_in(module), None) is None and not any(map(is_compiled, module.modules()))


def _written_keys(parameters: Sequence[tuple[nn.Parameter, int]]) -> set[int]:
    return {storage_key(parameter) for parameter, times in parameters if times_written(parameter) != times}


class _AsUsed(AsSaved):
    """Gives back what was packed, and refuses, as autograd does without hooks, what was written to since."""

    @staticmethod
    def pack(tensor: Tensor) -> list[Any]:
        return [tensor, times_written(tensor)]

    @staticmethod
    def is_unwritten(packed: list[Any]) -> bool:
        tensor, times = packed
        return times_written(tensor) == times

    def __call__(self, packed: Any) -> Tensor:
        tensor = super().__call__(packed)
        if not self.is_unwritten(packed):
            raise ExecutionError(
                f"a tensor ({short_name(tensor.dtype)}{list(tensor.shape)}) that a backward pass needs was "
                "written to after its forward pass had used it: register it as a buffer, of which each "
                "microbatch keeps what it used, or write to a copy (.clone())"
            )
        return tensor
