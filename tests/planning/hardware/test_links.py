from __future__ import annotations

import pytest

from partita.errors import PlanError
from partita.planning import LinkLevel, PairLink


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks of a link level is 0: give a whole number of at least 1"),
        ({"ports": 0}, "ports of a link level is 0: give a whole number of at least 1"),
        ({"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s of a link level is 0: give a number above 0"),
        ({"latency_s": -1.0}, "latency_s of a link level is -1.0: give a finite number of seconds"),
    ],
)
def test_a_level_out_of_range_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        LinkLevel(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "sender of a link is -1: give a whole number of at least 0"),
        ((0, 1.5), "receiver of a link is 1.5"),
        ((0, 1, -1.0), "bandwidth_bytes_per_s of the link from rank 0 to rank 1 is -1.0: give a number abo"),
        ((0, 1, 1.0, -1.0), "latency_s of the link from rank 0 to rank 1 is -1.0"),
    ],
)
def test_a_link_of_a_pair_out_of_range_is_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PairLink(*arguments)  # type: ignore[arg-type]
