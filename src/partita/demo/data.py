"""The demo's data: the source files of Python's standard library on this machine, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from partita.errors import UsageError

__all__ = ["ByteCorpus", "read_corpus"]

_VALIDATION_EVERY = 10
_ENOUGH_BYTES = 4_000_000
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


@dataclass(frozen=True)
class ByteCorpus:
    """Two texts as int64 bytes, from different files.

    Attributes:
        train: 1-d tensor of bytes to train on.
        validation: 1-d tensor of bytes that training never sees.
        files: how many files they come from, train and validation.
    """

    train: Tensor
    validation: Tensor
    files: tuple[int, int]

    def batch(
        self, step: int, batch: int, length: int, *, seed: int = 0, validation: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs and the next bytes of one step, both int64 of shape (batch, length).

        The same ``step``, sizes and ``seed`` give the same batch.
        """
        text = self.validation if validation else self.train
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 2 + validation)
        starts = torch.randint(0, len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_corpus(folder: Path | None = None) -> ByteCorpus:
    """Read the ``.py`` files below ``folder`` (default: the standard library), every tenth for validation.

    Raises:
        UsageError: there are too few source files (some distributions ship only compiled ones).
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if not _SKIPPED.intersection(path.relative_to(root).parts)
    )
    train, validation = bytearray(), bytearray()
    counts = [0, 0]
    for number, path in enumerate(paths):
        held_out = number % _VALIDATION_EVERY == 0
        part = validation if held_out else train
        part += path.read_bytes()
        counts[held_out] += 1
        if len(train) >= _ENOUGH_BYTES:
            break
    if min(len(train), len(validation)) < 10_000:
        raise UsageError(
            f"{root} has {len(paths)} Python source files with {len(train) + len(validation)} bytes, too few "
            "to train on: install the standard library's sources (Debian and Ubuntu: libpython3-stdlib)"
        )
    return ByteCorpus(_tensor(train), _tensor(validation), (counts[0], counts[1]))


def _tensor(text: bytearray) -> Tensor:
    return torch.frombuffer(text, dtype=torch.uint8).long()
