"""What the errors of a backward pass say."""

from __future__ import annotations

from typing import Any

import pytest

from partita.ddp.reducing.pass_errors import failed_everywhere, unfinished_pass
from partita.errors import ExecutionError, PeerFailed
from partita.runtime import InProcessWorld


def test_an_unfinished_pass_names_a_parameter_that_got_no_gradient_or_says_that_it_raised() -> None:
    assert "(2 parameters, 'a' among them, got no gradient)" in unfinished_pass(["a", "b"])
    assert "(it raised)" in unfinished_pass([])
    assert "use_reentrant=False" in unfinished_pass([])


def test_an_error_is_raised_here_and_known_to_the_others() -> None:
    seen: list[str] = []

    def body(comm: Any) -> None:
        if comm.rank == 0:
            raise failed_everywhere(comm, "not today", "backward")
        with pytest.raises(PeerFailed) as caught:
            comm.barrier()
        seen.append(str(caught.value))

    with pytest.raises(ExecutionError, match="not today"):
        InProcessWorld(2).run(body)
    assert "rank 0 failed in backward" in seen[0]
    assert "not today" in seen[0]
