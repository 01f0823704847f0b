"""Whatever fails, nobody hangs, and every other rank names the one that did, in time."""

from __future__ import annotations

import os

import pytest
from tests.fuzz.faults import Fault, check
from tests.runtime.hosts import may_make_hosts

COUNT = 60 if os.environ.get("PARTITA_FUZZ_EXAMPLES") else 2
FIRST = int(os.environ.get("PARTITA_FUZZ_SEED", "0"))
NETWORK = may_make_hosts()


@pytest.mark.parametrize("fault", [Fault.drawn(FIRST + n, network=NETWORK) for n in range(COUNT)], ids=str)
def test_every_other_rank_is_told_who_failed(fault: Fault) -> None:
    check(fault)
