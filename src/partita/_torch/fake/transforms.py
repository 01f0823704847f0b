"""What transforms of ``torch.func`` hand out, seen by modes that watch torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch._functorch import eager_transforms, vmap
from torch.overrides import handle_torch_function, has_torch_function

from partita._torch.containers.replaced import replaced

__all__ = ["endings_of_transforms_seen"]

_ENDINGS: tuple[tuple[Any, str], ...] = (
    (vmap, "_remove_batch_dim"),
    (eager_transforms, "_unwrap_for_grad"),
    (eager_transforms, "_unwrap_functional_tensor"),
)
"""What takes a tensor out of its transform, where torch looks it up."""


@contextmanager
def endings_of_transforms_seen() -> Iterator[None]:
    """In this block, modes see how a tensor leaves ``vmap``, ``grad`` and the like: as a call of a function
    that takes the transform's tensor and returns the one that the caller gets. Torch shows it to none.
    """
    with ExitStack() as stack:
        for module, name in _ENDINGS:
            stack.enter_context(replaced(module, name, partial(_seen, getattr(module, name))))
        yield


def _seen(function: Callable[..., Any], tensor: Any, *args: Any) -> Any:
    if not has_torch_function((tensor,)):
        return function(tensor, *args)
    return handle_torch_function(function, (tensor,), tensor, *args)
