"""The collector is paused while a graph is built, and comes back as it was."""

from __future__ import annotations

import gc

import pytest
import torch

import partita
from partita.splitter.building.collection import collection_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_afterwards(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_an_assignment_that_raises_leaves_the_collector_on() -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.sin(x))

    def assignment(node: torch.fx.Node) -> int:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        partita.split(gm, assignment)
    assert gc.isenabled()
