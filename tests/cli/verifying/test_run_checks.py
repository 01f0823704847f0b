"""From the options of ``partita verify`` to its checks."""

from __future__ import annotations

import pytest

from partita.cli.verifying.run_checks import cut_options
from partita.errors import UsageError


@pytest.mark.parametrize(
    ("stages", "split_at", "schedule", "number", "name"),
    [
        (None, None, None, 2, "1F1B"),
        (None, None, "zbvzerobubble", 4, "ZBVZeroBubble"),
        (3, None, "GPipe", 3, "GPipe"),
        (None, ["a", "b"], None, 3, "1F1B"),
    ],
)
def test_where_nobody_says_there_are_the_stages_of_two_ranks(
    stages: int | None, split_at: list[str] | None, schedule: str | None, number: int, name: str
) -> None:
    cut, order = cut_options(stages, split_at, schedule, None)
    assert order is not None
    assert (cut.number, order.name, order.microbatches) == (number, name, 4)


def test_no_microbatches_are_no_step_and_a_negative_number_is_refused() -> None:
    assert cut_options(2, None, None, 0)[1] is None
    with pytest.raises(UsageError, match="--microbatches is -1"):
        cut_options(2, None, None, -1)
