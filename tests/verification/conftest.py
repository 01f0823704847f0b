from __future__ import annotations

from collections.abc import Iterator

import pytest

from partita.verification import ambient


@pytest.fixture(autouse=True)
def settings_are_left_as_they_were() -> Iterator[None]:
    """No test here may leave a process-wide setting changed, for the next test would run under it."""
    before = ambient.capture()
    yield
    after = ambient.capture()
    ambient.restore(before)
    assert after == before
