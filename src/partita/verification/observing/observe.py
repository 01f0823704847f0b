"""Running one side of a comparison, and recording everything that can be observed of it."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch

from partita._torch.autograd import global_settings as ambient
from partita._torch.autograd.running_pass import leaves_behind
from partita._torch.compile.torch_logs import torch_logs_to
from partita.errors import NotCompiled
from partita.verification.observing import randomness
from partita.verification.observing.copying import Copies, copy_for_run
from partita.verification.observing.snapshot import NamedTensor, named_tensors, named_values
from partita.verification.observing.subject import Subject
from partita.verification.tree import tensors

__all__ = ["Mode", "Observation", "Raised", "observe"]

Mode: TypeAlias = Literal["train", "eval"]
"""Training or evaluation mode, as ``module.train()`` and ``module.eval()`` set it."""

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Raised:
    """An exception without its traceback, which would keep the whole run alive."""

    stage: str
    type: type[BaseException]
    message: str

    def __str__(self) -> str:
        return f"{self.type.__name__} in {self.stage}: {self.message}"


@dataclass
class Observation:
    """What one run left behind. Tensors are those of the run itself, not copies of them.

    Attributes:
        copies: callable, state and arguments as the run left them.
        before: the tensors that the state had before the run.
        values_before: the attributes that are no tensors, before the run and in its mode.
        output: the return value, or None where the run raised.
        raised: the exception.
        printed: (stream, text) pairs in order, with addresses replaced.
        random: states of the random generators, by stage (``forward``, ``backward``) and name.
        settings: process-wide settings, by stage and name.
        uncompiled: what was warned of stages that run as they are, though they were to be compiled.
        unnamed: (tensor, gradient) of what the output was computed from and the state has no name for (in a
            list, in a module in a list).
    """

    copies: Copies
    before: dict[str, NamedTensor]
    values_before: dict[str, Any]
    output: Any = None
    raised: Raised | None = None
    printed: tuple[tuple[str, str], ...] = ()
    random: dict[tuple[str, str], Any] = field(default_factory=dict)
    settings: dict[tuple[str, str], object] = field(default_factory=dict)
    uncompiled: tuple[str, ...] = ()
    unnamed: tuple[tuple[torch.Tensor, torch.Tensor | None], ...] = ()

    @property
    def returned(self) -> bool:
        """Whether the forward returned, even if the backward raised."""
        return self.raised is None or self.raised.stage != "forward"

    @property
    def leaked_inference_mode(self) -> bool:
        """Whether a stage left inference mode switched on or off."""
        now = torch.is_inference_mode_enabled()
        return any(
            value != now for (_, name), value in self.settings.items() if name == ambient.INFERENCE_MODE
        )

    def tensors(self) -> dict[str, NamedTensor]:
        """Return the tensors of the state after the run."""
        return {
            name: replace(now, replaced=name in self.before and now.tensor is not self.before[name].tensor)
            for name, now in named_tensors(self.copies.subject).items()
        }

    def values(self) -> dict[str, Any]:
        """Return the attributes that are no tensors after the run."""
        return named_values(self.copies.subject)


def observe(
    subject: Subject,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    backward: bool,
    seed: int,
    mode: Mode | None = None,
    instrument: Callable[[Subject], Callable[..., Any]] | None = None,
) -> Observation:
    """Run a copy of ``subject`` on copies of the arguments; nothing of the caller's changes::

        copy -> seed -> forward -> record settings and generators -> restore settings -> backward -> record

    Args:
        backward: whether there is one.
        mode: that the copies of the modules are put into; None: as they are.
        instrument: makes, from the copied subject, the callable that runs in its place.

    Raises:
        ArgumentTypeError: the subject or its arguments can't be copied. What the run itself raises is an
            observation.
    """
    copies = copy_for_run(subject, args, kwargs)
    if mode is not None:
        for _, root in copies.subject.roots:
            if isinstance(root, torch.nn.Module):
                root.train(mode == "train")
    call = copies.subject.call if instrument is None else instrument(copies.subject)
    seen = Observation(copies, named_tensors(copies.subject), named_values(copies.subject))
    log: list[tuple[str, str]] = []
    with randomness.preserved(), _captured(log) as warned:
        randomness.seed_all(seed)
        with _stage(seen, "forward"):
            seen.output = call(*copies.args, **copies.kwargs)
        if backward and seen.raised is None:
            with _stage(seen, "backward"):
                _backward(seen, seed)
    seen.printed = _merged(log)
    seen.uncompiled = tuple(str(one.message) for one in warned if issubclass(one.category, NotCompiled))
    return seen


def _backward(seen: Observation, seed: int) -> None:
    """Send the same random cotangents into every output that requires grad, all at once."""
    roots, cotangents = [], []
    for number, (_, tensor) in enumerate(tensors(seen.output, "output")):
        if not tensor.requires_grad:
            continue
        root = tensor if tensor.layout == torch.strided and not tensor.is_nested else _dense(tensor)
        # One generator an output: an output too many shifts no other's cotangent.
        generator = torch.Generator().manual_seed(seed + number)
        drawn = torch.randn(root.shape, generator=generator, dtype=_drawn_dtype(root.dtype), device="cpu")
        roots.append(root)
        cotangents.append(drawn.to(dtype=root.dtype, device=root.device))
    if not roots:
        return
    named = {id(item.tensor) for item in seen.tensors().values()} | {
        id(leaf) for _, leaf in seen.copies.leaves
    }
    unnamed = [leaf for leaf in leaves_behind(roots) if id(leaf) not in named]
    before = [leaf.grad for leaf in unnamed]
    for leaf in unnamed:  # which may be the caller's own: a global variable
        leaf.grad = None
    try:
        torch.autograd.backward(roots, cotangents)
    finally:
        seen.unnamed = tuple((leaf, leaf.grad) for leaf in unnamed)
        for leaf, gradient in zip(unnamed, before, strict=True):
            leaf.grad = gradient


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.to_padded_tensor(tensor, 0.0) if tensor.is_nested else tensor.to_dense()


def _drawn_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128 if dtype == torch.complex128 else torch.complex64
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def _stage(seen: Observation, name: str) -> Iterator[None]:
    with ambient.preserved():
        try:
            yield
        except Exception as error:  # what the model raises is part of what it does
            seen.raised = Raised(name, type(error), _ADDRESS.sub("0x...", str(error)))
        for setting, value in ambient.capture().items():
            seen.settings[name, setting] = value
        for generator, state in randomness.capture().items():
            seen.random[name, generator] = state


class _Tee(io.TextIOBase):
    """A stream that writes to a log shared with the other stream, so that their order is kept."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self._name = name
        self._log = log

    def write(self, text: str) -> int:
        self._log.append((self._name, text))
        return len(text)


@contextmanager
def _captured(log: list[tuple[str, str]]) -> Iterator[list[warnings.WarningMessage]]:
    stdout, stderr = sys.stdout, sys.stderr
    # Python shows a warning once, so the second run would lack those of the first: compare none.
    with warnings.catch_warnings(record=True) as warned:
        sys.stdout, sys.stderr = _Tee("stdout", log), _Tee("stderr", log)
        try:
            with torch_logs_to(stderr):
                yield warned
        finally:
            sys.stdout, sys.stderr = stdout, stderr


def _merged(log: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    merged: list[tuple[str, str]] = []
    for stream, text in log:
        if merged and merged[-1][0] == stream:
            merged[-1] = (stream, merged[-1][1] + text)
        else:
            merged.append((stream, text))
    return tuple((stream, _ADDRESS.sub("0x...", text)) for stream, text in merged)
