"""The demo's data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from partita.demo.data import ByteCorpus, read_corpus
from partita.errors import UsageError


def test_the_standard_library_is_large_enough() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 500_000
    assert len(corpus.validation) > 50_000
    assert int(corpus.train.max()) < 256


def test_a_batch_is_the_same_for_the_same_numbers_and_targets_are_the_next_bytes() -> None:
    text = torch.arange(1000) % 251
    corpus = ByteCorpus(text, text.flip(0), (1, 1))
    inputs, target = corpus.batch(3, 4, 8)
    assert inputs.shape == target.shape == (4, 8)
    assert torch.equal((inputs + 1) % 251, target)
    assert torch.equal(inputs, corpus.batch(3, 4, 8)[0])
    assert not torch.equal(inputs, corpus.batch(4, 4, 8)[0])
    assert not torch.equal(inputs, corpus.batch(3, 4, 8, validation=True)[0])


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few to train on"):
        read_corpus(tmp_path)
