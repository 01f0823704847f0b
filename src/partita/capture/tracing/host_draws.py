"""Refusing models that draw random numbers outside of torch: a graph would repeat the draws of its capture.

``if random.random() < self.rate: h = block(h)`` is decided in Python while the model is traced, and the graph
has one of the two branches. So the states of the generators are compared after every trace::

    the same state                        no draws: the graph is the model
    another one, which is the same after
    a trace from another initial state    the model seeds the generator itself: always the same draws
    another one, which differs then       refused, with the line that draws

The generators are Python's and numpy's global ones and those that are attributes of the model's modules.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

from torch import nn

from partita._torch.export.users_code import is_users
from partita.capture.tracing.blame import line_of
from partita.errors import CaptureError

__all__ = ["HostGenerators"]


class HostGenerators:
    """The generators outside of torch that a model can draw from, with their states at construction."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named = dict(_generators(model))
        self._before = self._states()

    @property
    def moved(self) -> bool:
        """Whether any of them has another state now."""
        return self._states() != self._before

    def reset(self) -> None:
        """Restore all states."""
        for name, generator in self._named.items():
            _write(generator, pickle.loads(self._before[name]))

    def check(self, again: Callable[[], object]) -> None:
        """Refuse a model that drew from one of them.

        Args:
            again: traces the model once more; called only if a state has changed.

        Raises:
            CaptureError: names the generator and the line that drew.
        """
        if not self.moved:
            return
        after = self._states()
        self.reset()
        for generator in self._named.values():
            generator.random()
        line = self._line_that_draws(again)
        elsewhere = self._states()
        free = [name for name in after if after[name] not in (self._before[name], elsewhere[name])]
        if free:
            place = f" (at {line})" if line else ""
            raise CaptureError(
                f"{type(self._model).__name__} draws from {free[0]} in its forward{place}: a graph would "
                "repeat the draw of its capture in every run. Draw with torch (torch.rand, torch.where, "
                "nn.Dropout), which a graph holds as an operation, or draw outside and pass the number in; "
                "where the draw decides whether a layer runs (layerdrop), set its rate to 0. Where the model "
                "draws all the same, cut it at its blocks, which leaves its code as it is: pipeline(..., "
                "frontend=\"modules\"), or, where evaluation is all that is needed, modes='eval'"
            )

    def _states(self) -> dict[str, bytes]:
        return {name: pickle.dumps(_read(generator)) for name, generator in self._named.items()}

    def _line_that_draws(self, trace: Callable[[], object]) -> str:
        """The first line of the user's code after which a generator has another state."""
        before, last, drawing = self._states(), "", ""

        def at_line(frame: FrameType, _event: str, _value: Any) -> Any:
            nonlocal last, drawing
            if drawing:
                return None
            if self._states() != before:
                drawing = last
            last = line_of(frame)
            return at_line

        def at_call(frame: FrameType, _event: str, _value: Any) -> Any:
            return at_line if is_users(frame.f_code.co_filename) else None

        outer = sys.gettrace()
        sys.settrace(at_call)
        try:
            with suppress(Exception):  # with other numbers the model may take a branch that can't be traced
                trace()
        finally:
            sys.settrace(outer)
        return drawing


def _generators(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield "Python's random", random
    numpy = sys.modules.get("numpy")  # optional: whoever draws from it has imported it
    if numpy is not None:
        yield "numpy.random", numpy.random
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _is_generator(value):
                yield f"the generator {'.'.join(filter(None, (path, name)))}", value


def _is_generator(value: object) -> bool:
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)  # which has no state
    return type(value).__module__.startswith("numpy.random") and hasattr(value, "random")


def _read(generator: Any) -> Any:
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def _write(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
