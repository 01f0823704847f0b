"""Modules whose tensors are not here, in ``state_dict()`` and ``load_state_dict()``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from partita._torch.containers.replaced import replaced

__all__ = ["asked_for_no_state", "save_nothing_of_its_own"]


def save_nothing_of_its_own(module: nn.Module) -> None:
    """Let ``state_dict()`` ask ``module``, whose tensors are not here, for none of them where its class has
    a way of its own to save them, which may not expect that.
    """
    if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
        vars(module)["_save_to_state_dict"] = _nothing


@contextmanager
def asked_for_no_state(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In this block ``load_state_dict()`` neither gives anything to these modules nor misses anything, and
    does not call their hooks. What they contain is asked as ever.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, "_load_from_state_dict", _nothing))
        yield


def _nothing(*_: object) -> None:
    """In the place of a method that saves or loads what a module itself holds."""
