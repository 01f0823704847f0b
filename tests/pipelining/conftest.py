from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.group_of_one import group_of_one


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, which torch's stages need."""
    with group_of_one():
        yield
