"""The costs of a model that was named."""

from __future__ import annotations

import pytest
import torch

from partita.cli.models import measured_costs
from partita.cli.models.measured_costs import measure_costs
from partita.cli.models.model_source import ModelSource
from partita.cli.models.user_file import Built


@pytest.mark.parametrize(("ranks", "given", "threads"), [(2, None, 1), (2, "2", 2), (1, None, 2)])
def test_ranks_that_share_this_machine_are_measured_with_a_thread_each(
    monkeypatch: pytest.MonkeyPatch, ranks: int, given: str | None, threads: int
) -> None:
    measured: list[int] = []
    count = lambda *_, **__: measured.append(torch.get_num_threads())  # noqa: E731
    monkeypatch.setattr(measured_costs, "measure_units", count)
    monkeypatch.setattr(ModelSource, "build", lambda *_: Built(torch.nn.Linear(2, 2), (torch.ones(1, 2),)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure_costs(ModelSource("x"), None, ranks, None, lambda _: None)
        assert (measured, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)
