from __future__ import annotations

import random

import pytest
import torch

from partita.verification.observing import randomness


def test_seeded_draws_repeat_and_the_callers_state_comes_back() -> None:
    before = randomness.capture()
    drawn = []
    for _ in range(2):
        with randomness.preserved():
            randomness.seed_all(3)
            drawn.append((torch.rand(2).tolist(), random.random()))
    assert drawn[0] == drawn[1]
    after = randomness.capture()
    assert all(randomness.same_state(before[name], after[name]) for name in before)


def test_numpys_generator_is_kept_where_numpy_is_loaded() -> None:
    numpy = pytest.importorskip("numpy")
    before = randomness.capture()
    assert "numpy generator" in before
    with randomness.preserved():
        numpy.random.rand(1)
        assert not randomness.same_state(before["numpy generator"], randomness.capture()["numpy generator"])
    assert randomness.same_state(before["numpy generator"], randomness.capture()["numpy generator"])
