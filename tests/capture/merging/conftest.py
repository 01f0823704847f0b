from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from partita.capture import attempts


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The mode of each trace that is made."""
    modes: list[bool] = []
    original = attempts.export_module

    def export(model: nn.Module, *args: Any, **options: Any) -> Any:
        modes.append(model.training)
        return original(model, *args, **options)

    monkeypatch.setattr(attempts, "export_module", export)
    return modes
