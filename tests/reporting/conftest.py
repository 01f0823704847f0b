"""A made-up run for every test of the report; see ``fake_report.py`` for what it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.reporting.fake_report import fake_losses, fake_report, fake_timeline

from partita.reporting import LossPoint, RunReport, Timeline


@pytest.fixture(scope="session")
def report() -> RunReport:
    return fake_report()


@pytest.fixture(scope="session")
def make_timeline() -> Callable[..., Timeline]:
    return fake_timeline


@pytest.fixture(scope="session")
def make_losses() -> Callable[..., tuple[LossPoint, ...]]:
    return fake_losses
