"""Letting a model that asks whether it is being exported believe that it simply runs.

Some models take another way while they are traced: they build a mask where they would have used
``is_causal``, or choose another algorithm. The graph then computes something that the model, as its user runs
it, never does: other bits, slower kernels. So while partita traces, ``torch.compiler.is_compiling()`` and
``is_exporting()`` answer False to everybody but torch itself, and a tensor that has no data is no
``FakeTensor``.

What such a model also does when it believes that it simply runs is to keep tensors for later. Those that it
keeps in a ``functools.lru_cache`` belong to the trace, so caches that were filled meanwhile are emptied.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from partita._torch.modules.memoised_functions import memos

__all__ = ["eager_answers"]

_ASKERS = 3
"""How many frames of the stack are compared with the exempt files: the one that asks, and its callers."""
_QUESTIONS = ("is_compiling", "is_exporting")


@contextmanager
def eager_answers(exempt: Collection[str] = ()) -> Iterator[None]:
    """In this block, code outside of torch is told that nothing is compiled or exported.

    Args:
        exempt: files whose code, and what it calls, gets the true answer all the same: it can't be traced as
            it runs.

    >>> with eager_answers():
    ...     torch.compiler.is_exporting()
    False
    """
    functions = [getattr(torch.compiler, name) for name in _QUESTIONS]
    questions = [_Question(function) for function in functions if _is_plain(function)]
    caches = {id(cache): cache.cache_info().misses for cache in _caches()}
    try:
        for question in questions:
            question.answer_with(_for_torch_only(question.original(), exempt))
        torch._subclasses.__class__ = _Subclasses
        yield
    finally:
        torch._subclasses.__class__ = types.ModuleType
        for question in questions:
            question.put_back()
        for cache in _caches():
            if cache.cache_info().misses != caches.get(id(cache), 0):
                cache.cache_clear()


class _Question:
    """A function of ``torch.compiler`` that can be made to answer something else.

    The function itself stays: Dynamo knows it by identity, and keeps what it knows for the process's life, so
    that one which had stood in its place while a model was traced would break every later graph. Code that
    imported it by name is answered too.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._code, self._defaults = function.__code__, function.__defaults__

    def original(self) -> Callable[[], bool]:
        """Return a function that answers as this one did."""
        return types.FunctionType(self._code, self._function.__globals__, argdefs=self._defaults)

    def answer_with(self, answer: Callable[[], bool]) -> None:
        """Answer with what ``answer`` returns."""
        self._function.__code__, self._function.__defaults__ = _ask.__code__, (answer,)

    def put_back(self) -> None:
        self._function.__code__, self._function.__defaults__ = self._code, self._defaults


def _is_plain(function: Any) -> bool:
    """Return whether its code can be changed; what somebody has put in its place keeps its own answer."""
    return isinstance(function, types.FunctionType) and not function.__closure__


def _ask(answer: Callable[[], bool]) -> bool:
    return answer()


def _for_torch_only(function: Callable[[], bool], exempt: Collection[str]) -> Callable[[], bool]:
    def answer() -> bool:
        frame: FrameType | None = sys._getframe(2)
        true = _of_torch(str(sys._getframe(2).f_globals.get("__name__", "")))
        for _ in range(_ASKERS):
            if true or frame is None:
                break
            true = frame.f_code.co_filename in exempt
            frame = frame.f_back
        return true and function()

    return answer


class _NoFakes:
    """In place of ``FakeTensor``, so that ``isinstance`` is false for every tensor."""


class _Subclasses(types.ModuleType):
    """``torch._subclasses`` as others than torch see it."""

    @property
    def FakeTensor(self) -> type:  # noqa: N802 - the name that is looked for
        asker = str(sys._getframe(1).f_globals.get("__name__", ""))
        return FakeTensor if _of_torch(asker) else _NoFakes


def _caches() -> list[Any]:
    """Return all ``lru_cache`` functions that are not torch's own."""
    return [cache for cache in memos() if not _of_torch(str(getattr(cache, "__module__", "")))]


def _of_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")
