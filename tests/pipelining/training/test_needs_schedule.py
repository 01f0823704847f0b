"""Functions that work on all stages of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pipelining.models import PLAIN
from tests.pipelining.running import cut

from partita.errors import ArgumentError
from partita.pipelining import GradScaler, clip_grad_norm_


@pytest.mark.parametrize(
    ("function", "name"),
    [(lambda it: clip_grad_norm_(it, 1.0), "clip_grad_norm_"), (GradScaler, "GradScaler")],
)
def test_what_is_no_schedule_is_refused(function: Any, name: str) -> None:
    stage = cut(PLAIN, 2).build_stage(0)
    for other in (stage, stage.module.parameters()):
        with pytest.raises(ArgumentError, match=f"{name} takes the schedule, got {type(other).__name__}"):
            function(other)
