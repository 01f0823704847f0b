"""``Replicated``: the class that a module has in addition as long as it is replicated."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn

from partita.ddp.replicas.replication import Replication
from partita.errors import ExecutionError

__all__ = ["Replicated", "replicated_class", "turn_into"]


class Replicated(nn.Module):
    """What `replicate` turns a module into: the same object, whose class is also this one."""

    @property
    def replication(self) -> Replication:
        """What reduces its gradients."""
        replication: Replication | None = vars(self).get("_partita_replication")
        if replication is None:
            raise ExecutionError(
                "this is a copy of a replicated module, and not replicated itself: call replicate()"
            )
        return replication

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of forward passes in this block on their rank: they add up there until a later
        pass is reduced.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether gradients of forward passes from now on are reduced, as of torch's DDP: loops that add
        gradients up set it in place of a `no_sync` block.
        """
        return self.replication.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self.replication.sync = sync

    def expect_backward(self) -> None:
        """Reduce the next backward pass, though its forward pass lay in `no_sync`: for pipelines, whose
        forward and backward passes interleave.
        """
        self.replication.expect_backward()

    @contextmanager
    def local(self) -> Iterator[None]:
        """Use the module as this rank's own, as ``.module`` of torch's DDP is.

        Nothing is sent or reduced in this block, in training mode too, and other ranks need not take part.
        Gradients of backward passes in it stay on this rank: call ``zero_grad()`` before the next step.
        """
        replication = self.replication
        before, replication.reducer.paused = replication.reducer.paused, True
        try:
            yield
        finally:
            replication.reducer.paused = before

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copies and pickles of the class that the module had before."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        original_class = type(self).__mro__[2]
        _, args, state, *rest = reduced
        state = {key: value for key, value in state.items() if key != "_partita_replication"}
        return (_created, (original_class, *args[1:]), _without_hook(state), *rest)


def replicated_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``original`` that is a `Replicated` too."""
    body: dict[str, Any] = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    if original.forward.__module__.startswith("torch."):
        body["forward"] = _forward  # Dynamo would trace through the hook of a module of torch's own
    return type(original.__name__, (Replicated, original), body)


def turn_into(cls: type[nn.Module], module: nn.Module, replication: Replication) -> None:
    """Give ``module`` the class of replicated modules, until ``replication`` is closed."""
    original_class, module_ref = type(module), ref(module)
    module.__class__ = cls
    vars(module)["_partita_replication"] = replication
    handle = module.register_forward_pre_hook(_before_forward, prepend=True)

    def undo() -> None:
        handle.remove()
        replicated = module_ref()
        if replicated is not None:
            replicated.__class__ = original_class
            del vars(replicated)["_partita_replication"]

    replication.on_close(undo)


def _created(cls: type[nn.Module], *args: Any) -> nn.Module:
    return cls.__new__(cls, *args)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return super(Replicated, self).forward(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(module: nn.Module, _args: Any) -> None:
    replication = vars(module).get("_partita_replication")
    if replication is not None:
        replication.before_forward(module)


def _without_hook(state: dict[str, Any]) -> dict[str, Any]:
    hooks = state.get("_forward_pre_hooks")
    if not hooks:
        return state
    others = type(hooks)((key, hook) for key, hook in hooks.items() if hook is not _before_forward)
    return {**state, "_forward_pre_hooks": others}
