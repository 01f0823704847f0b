from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from partita.capture import attempts

Attempt = tuple[bool, str, bool]
"""Whether in training, the way of tracing, whether with open sizes."""


def _note_traces(monkeypatch: pytest.MonkeyPatch, note: Callable[[Attempt], object]) -> None:
    original = attempts.export_module

    def export(model: nn.Module, *args: Any, **options: Any) -> Any:
        note((model.training, options["way"], options["dynamic_shapes"] is not None))
        return original(model, *args, **options)

    monkeypatch.setattr(attempts, "export_module", export)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The mode of each trace that is made."""
    modes: list[bool] = []
    _note_traces(monkeypatch, lambda attempt: modes.append(attempt[0]))
    return modes


@pytest.fixture
def attempted(monkeypatch: pytest.MonkeyPatch) -> Counter[Attempt]:
    """How often each attempt was traced."""
    counted: Counter[Attempt] = Counter()
    _note_traces(monkeypatch, lambda attempt: counted.update([attempt]))
    return counted
