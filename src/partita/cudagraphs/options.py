"""How the backend is set: what records, what counts, and what compiles the pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import torch
from torch.fx import GraphModule

from partita._torch.compile.inductor import compile_with_inductor
from partita.cudagraphs.recording.cpu import ReplayRecorder
from partita.cudagraphs.recording.cuda import CudaRecorder
from partita.cudagraphs.recording.recorder import GraphRecorder
from partita.cudagraphs.regions.capturable import CaptureRules
from partita.cudagraphs.regions.launch_savings import SavingModel
from partita.errors import ArgumentError

__all__ = ["BackendOptions"]

PieceCompiler: TypeAlias = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]
"""A function from a flat graph and its example inputs to what runs it."""

_INNER: dict[str, PieceCompiler | None] = {
    "aot_eager": None,
    "eager": None,  # its name before it was called as in `partita.ddp`
    "inductor": compile_with_inductor,
}


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backend, as ``torch.compile(..., options={...})`` takes them.

    Attributes:
        recorder: ``"cuda"``, ``"replay"`` (the CPU, for tests), or a function from a device to its
            `GraphRecorder`. None: ``"cuda"`` where there is a GPU, and nothing where there is none.
        allow: custom operators that may be captured, see `CaptureRules`.
        saving: which regions are worth it.
        max_recordings: how many kinds of calls each region keeps, and how many microbatches under way
            together have recordings of their own, see `CudaGraphModule`.
        inner: compiles each piece before it is recorded: ``"inductor"`` (without CUDA graphs of its own, and
            with the random numbers of the operators), or a function from a graph and example inputs to a
            function of the same inputs. ``"aot_eager"`` or None runs the graph as it is.
        buckets: sizes to which the batch (dimension 0 of the inputs) is padded in inference, so that a few
            recordings serve all sizes; larger batches are not padded. Only graphs whose rows provably keep
            apart are padded, see `PaddedGraph`.
        rows_apart: the user's word that rows keep apart where no proof is found. It is checked at the first
            call of each bucket.
    """

    recorder: str | Callable[[torch.device], GraphRecorder] | None = None
    allow: frozenset[str] = frozenset()
    saving: SavingModel = field(default_factory=SavingModel)
    max_recordings: int = 8
    inner: Literal["aot_eager", "eager", "inductor"] | PieceCompiler | None = None
    buckets: tuple[int, ...] = ()
    rows_apart: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.recorder, str) and self.recorder not in ("cuda", "replay"):
            raise ArgumentError(
                f"recorder is 'cuda', 'replay' or a function from a device to a recorder, got "
                f"{self.recorder!r}"
            )
        if self.inner not in (None, *_INNER) and not callable(self.inner):
            raise ArgumentError(
                f"inner is 'aot_eager', 'inductor' or a function (gm, example_inputs) -> callable, got "
                f"{self.inner!r}: leave it out to run the graph as it is"
            )
        if any(size < 1 for size in self.buckets) or list(self.buckets) != sorted(set(self.buckets)):
            raise ArgumentError(
                f"buckets are {self.buckets}: give sizes of 1 or more in rising order, each once"
            )
        if len(self.buckets) > self.max_recordings:
            raise ArgumentError(
                f"{len(self.buckets)} buckets need a recording each, and max_recordings is "
                f"{self.max_recordings}: raise it, or give fewer buckets"
            )
        if self.max_recordings < 1:
            raise ArgumentError(
                f"max_recordings is {self.max_recordings}: a region needs room for at least 1"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """Return the options of a mapping.

        Raises:
            ArgumentError: an unknown option, or a value that can't be used.
        """
        values = dict(options or {})
        names = [item.name for item in fields(cls)]
        unknown = sorted(values.keys() - set(names))
        if unknown:
            raise ArgumentError(f"unknown option {unknown[0]!r}: partita_cudagraphs takes {', '.join(names)}")
        if "allow" in values:
            values["allow"] = frozenset(values["allow"])
        if "buckets" in values:
            values["buckets"] = tuple(values["buckets"])
        return cls(**values)

    @property
    def records(self) -> bool:
        """Whether anything is recorded at all on this machine."""
        return self.recorder is not None or torch.cuda.is_available()

    @property
    def compiler(self) -> PieceCompiler | None:
        """What compiles a piece, or None."""
        return _INNER[self.inner] if isinstance(self.inner, str) else self.inner

    def rules(self) -> CaptureRules:
        """Return what may be captured under these options."""
        return CaptureRules("cpu" if self.recorder == "replay" else self._device_type(), self.allow)

    def make_recorder(self, device: torch.device) -> GraphRecorder:
        """Return a recorder for one device."""
        if callable(self.recorder):
            return self.recorder(device)
        return ReplayRecorder() if self.recorder == "replay" else CudaRecorder(device)

    def _device_type(self) -> str:
        return self.recorder(torch.device("cpu")).device_type if callable(self.recorder) else "cuda"
