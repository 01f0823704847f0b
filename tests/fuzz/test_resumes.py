"""A training that is killed again and again ends with the weights of one that nobody disturbed."""

from __future__ import annotations

import os

import pytest
from tests.fuzz.resumes import Training, check

COUNT = 15 if os.environ.get("PARTITA_FUZZ_EXAMPLES") else 1
FIRST = int(os.environ.get("PARTITA_FUZZ_SEED", "0"))


@pytest.mark.dear
@pytest.mark.parametrize("training", [Training.drawn(FIRST + n) for n in range(COUNT)], ids=str)
def test_a_killed_training_goes_on_bit_for_bit(training: Training) -> None:
    """Two kills each."""
    check(training)
