"""What holds for every test: one thread, so that runs are repeatable, and properties without a clock."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from partita.verification import ambient

torch.set_num_threads(1)

# On a busy machine the time of one example says nothing. PARTITA_RANDOMIZE=1 looks for new examples. Which
# lines a failure depends on is not looked for: with every line of torch traced that takes hours, beyond any
# time limit.
settings.register_profile(
    "partita",
    deadline=None,
    derandomize=os.environ.get("PARTITA_RANDOMIZE") != "1",
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
settings.load_profile("partita")


@pytest.fixture(autouse=True)
def _same_settings() -> Iterator[None]:
    """What a test leaves behind, such as another default dtype, the next ones would run with."""
    before = ambient.capture()
    yield
    after = ambient.capture()
    ambient.restore(before)
    assert after == before


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """What one test compiled, and how often, is no business of the next."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
