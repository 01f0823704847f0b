"""Checkpoints at intervals, written while training goes on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from partita.errors import ArgumentError
from partita.pipelining.checkpoints.contents.prepare import Optimizers, Request, prepare
from partita.pipelining.checkpoints.contents.replicas import Replicas
from partita.pipelining.checkpoints.contents.staging import SnapshotBuffers
from partita.pipelining.checkpoints.files.manifest import MANIFEST
from partita.pipelining.checkpoints.files.manifest_writer import ManifestWriter
from partita.pipelining.checkpoints.together.savers import Savers, agree, attempt, savers_of
from partita.pipelining.checkpoints.together.shared_folder import check_shared
from partita.pipelining.stages.placing.state_of_stage import Stages

__all__ = ["Snapshots"]


class Snapshots:
    """Saves a checkpoint at every so many steps while training goes on, and keeps the newest ones.

    A snapshot is a checkpoint as of `save_checkpoint`, in a directory of its own (``step-000000100``), which
    appears when it is complete: `latest_checkpoint` finds it, `load_checkpoint` reads it. `save` copies this
    rank's part to the CPU, and a thread writes the copy. The next snapshot waits for the one before it.

    Where ``torch.distributed`` is initialised `save`, `wait` and `close` are collective.

    Args:
        folder: on a file system that all ranks share; made if it is not there. Nothing else should be in it.
        every: the number of steps from one snapshot to the next.
        keep: how many are kept; older ones are removed when a new one is complete.
        process_group: of the ranks that hold the model; the default one if not given.
        replicas: what becomes of copies that differ; see `save_checkpoint`. ``first`` compares none, which
            takes less time where ranks hold large copies (data parallel training).
        model_key: the prefix of the model's names.
        optimizer_key: the prefix of the optimizer's.

    Raises:
        ArgumentError: ``every`` or ``keep`` is less than 1.

    >>> import tempfile, torch
    >>> folder, model = Path(tempfile.mkdtemp()), torch.nn.Linear(2, 2)
    >>> with Snapshots(folder, every=2, keep=2) as snapshots:
    ...     saved = [snapshots.save(step, model) for step in range(1, 7)]
    >>> saved, sorted(path.name for path in folder.iterdir())
    ([False, True, False, True, False, True], ['step-000000004', 'step-000000006'])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int = 3,
        process_group: dist.ProcessGroup | None = None,
        replicas: Replicas = "equal",
        model_key: str = "model",
        optimizer_key: str = "optim",
    ) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value < 1:
                raise ArgumentError(f"{name} is {value}: give at least 1")
        self._folder = Path(folder)
        self._every = every
        self._keep = keep
        self._options: tuple[Replicas, str, str] = (replicas, model_key, optimizer_key)
        self._group = process_group
        self._copies = SnapshotBuffers()
        self._running: tuple[Savers, Future[Any], Path] | None = None
        self._has_begun = False

    def save(
        self,
        step: int,
        stages: Stages,
        optimizers: Optimizers | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> bool:
        """Begin a snapshot if one is due. Collective; all ranks call it with the same step.

        Args:
            step: the number of steps made.
            stages: this rank's stages, or a whole model; this and the others as for `save_checkpoint`.

        Returns:
            Whether a snapshot was due.

        Raises:
            CheckpointError: on all ranks: this snapshot can't be saved (see `save_checkpoint`), or the one
                before could not be written.
            PeerFailed: another rank failed or died meanwhile.
        """
        if step % self._every:
            return False
        self.wait()
        savers = savers_of(stages, self._group)
        target = self._folder / f"step-{step:09d}"
        if not self._has_begun:
            check_shared(self._folder, savers)
        agree(savers, attempt(lambda: self._clear(target) if savers.first else None, target, "written")[1])
        self._has_begun = True
        replicas, model_key, optimizer_key = self._options
        request = Request(
            stages, optimizers, extra or {}, replicas, model_key, optimizer_key, allow_pickle=False
        )
        prepared = prepare(request, target, savers)
        staged, problem = attempt(lambda: self._copies.of(prepared.values), target, "written")
        agree(savers, problem)
        assert staged is not None
        writer = ManifestWriter(
            _unfinished(target),
            prepared.aliases,
            steps=prepared.steps,
            done=lambda: self._publish(target),
        )
        self._running = savers, savers.start(staged, writer), target
        return True

    def wait(self) -> None:
        """Wait until the last snapshot is written. Collective.

        Raises:
            CheckpointError: on all ranks: it could not be written.
        """
        if self._running is None:
            return
        savers, running, target = self._running
        _, problem = attempt(running.result, target, "written")
        self._running = None
        agree(savers, problem)

    def close(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error, other ranks may never get here
            self.close()

    def _clear(self, target: Path) -> None:
        """Remove unfinished directories: this snapshot's; the first time all that an earlier run has left."""
        old = [_unfinished(target)] if self._has_begun else self._folder.glob(".step-*")
        for path in old:
            if path.exists():
                shutil.rmtree(path)

    def _publish(self, target: Path) -> None:
        """Give the complete snapshot its name, and remove old ones. On the first rank, in its thread."""
        aside = _set_aside(target) if target.exists() else None  # of a training that was resumed before it
        _unfinished(target).rename(target)
        if aside is not None:
            shutil.rmtree(aside)
        finished = [path for path in self._folder.glob("step-*") if (path / MANIFEST).exists()]
        finished.sort(key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))
        for path in finished[: -self._keep]:
            shutil.rmtree(_set_aside(path))


def _unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}")


def _set_aside(path: Path) -> Path:
    """Rename a directory, so that nobody takes it for a checkpoint while it is being removed."""
    aside = path.with_name(f".{path.name}.old")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)
