"""Random training scripts on two processes do what they do over the uncut model, or are refused by both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fuzz.running_scripts import run_scripts
from tests.runtime.worlds import ProcessWorld, patience

EXAMPLES = os.environ.get("PARTITA_FUZZ_EXAMPLES")
ONCE = 40
"""So many scripts share two processes."""
LAUNCHES = min(5, 1 + int(EXAMPLES) // ONCE) if EXAMPLES else 1
FIRST = int(os.environ.get("PARTITA_FUZZ_SEED", "0"))


@pytest.mark.dear
@pytest.mark.parametrize("launch", range(LAUNCHES))
def test_random_scripts_end_as_over_the_uncut_model(launch: int, tmp_path: Path) -> None:
    seeds = range(FIRST + ONCE * launch, FIRST + ONCE * (launch + 1))
    with patience(60.0 * ONCE):
        outcomes = ProcessWorld(2).run(run_scripts, seeds, str(tmp_path))
    differences = [it.difference for rank in outcomes for it in rank if it.difference]
    assert not differences, "\n".join(differences)
    refused = [{it.seed for it in rank if it.refusal} for rank in outcomes]
    assert refused[0] == refused[1], "one rank refuses what the other runs"
    assert len(refused[0]) < ONCE / 2, "\n".join(it.refusal for it in outcomes[0] if it.refusal)
