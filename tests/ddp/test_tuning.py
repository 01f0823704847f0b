"""Buckets from measurements."""

from __future__ import annotations

from typing import Any

import pytest
from tests.ddp import models
from tests.ddp.alone import alone
from tests.ddp.models import seeded

from partita.ddp import replicate
from partita.ddp.tuning import measure_links
from partita.errors import PlanError


def test_a_plan_needs_measurements() -> None:
    def body(comm: Any) -> None:
        module = replicate(seeded(models.mlp), comm)
        with pytest.raises(PlanError, match="there is no measurement of 10 of 10 parameters"):
            module.replication.plan()
        assert measure_links(comm).ranks == 1

    alone(body)
