"""The example's way through a model: which module calls what when, and who uses what."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.containers.pytree import tree_map
from partita._torch.fake.ghosts import held_by_python, undisturbed
from partita._torch.modules.calls import (
    calls_watched,
    inside_of_checkpoint,
    overridden_calls,
    watch_calls,
)
from partita._torch.tensors.versions import times_written
from partita.capture.modes import in_mode
from partita.errors import CaptureError
from partita.pipelining.blocks.answers import tensors_in
from partita.pipelining.blocks.cut import BlockCut, Event, Site
from partita.pipelining.blocks.memos import nothing_remembered
from partita.pipelining.blocks.packet import given
from partita.pipelining.blocks.run import Run, all_tensors
from partita.pipelining.blocks.stage_module import entering, generator_states, leaving, set_generators

__all__ = ["Moment", "RecordedPass", "record", "twin_of"]


@dataclass(frozen=True)
class Moment:
    """A call of a module begins or ends.

    Attributes:
        position: how many functions were called before.
        seconds: since the beginning.
    """

    event: Event
    position: int
    seconds: float


@dataclass
class RecordedPass:
    """What one pass has done. Functions are counted from 0; values are numbered as in a `Run`.

    Attributes:
        training: the mode that the model was in.
        moments: calls of modules, in order.
        made: for each value where it was made; -1 for the model's arguments.
        sites: for each value.
        bytes: for each value.
        alive: at calls that were watched, the values that Python code held.
        checkpointed: calls that were watched and lie within ``torch.utils.checkpoint``.
        uses: (function, value); what a module is given counts as used by the next function.
        writes: (function, value) where a function writes to a value that it did not make.
        state_uses: (function, name) of parameters and buffers.
        state_writes: likewise, where they are written to.
        count: how many functions were called.
        seconds: how long it took.
        output: what the model returned, on the meta device.
    """

    training: bool
    moments: list[Moment] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    alive: dict[Event, tuple[int, ...]] = field(default_factory=dict)
    checkpointed: set[Event] = field(default_factory=set)
    uses: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    state_uses: list[tuple[int, str]] = field(default_factory=list)
    state_writes: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0
    seconds: float = 0.0
    output: Any = None

    def calls(self, path: str) -> list[int]:
        """The numbers of the calls of a module."""
        return [moment.event[1] for moment in self.moments if moment.event[0] == path and not moment.event[2]]


class _Recorder(Run):
    """Runs all of the model, and notes what it sees."""

    def __init__(self, recording: RecordedPass, watch: Collection[str], **options: Any) -> None:
        nothing: Mapping[bool, Mapping[Any, Any]] = {True: {}, False: {}}
        super().__init__(0, BlockCut(1, nothing, {}, nothing), **options)
        self.recording = recording
        self._watch = watch
        self._start = time.perf_counter()

    def reached(self, event: Event, home: int) -> None:  # noqa: ARG002
        """Nothing begins here."""
        seconds = time.perf_counter() - self._start
        self.recording.moments.append(Moment(event, self.recording.count, seconds))
        if event[0] in self._watch:
            if inside_of_checkpoint():
                self.recording.checkpointed.add(event)
            with undisturbed():
                held = held_by_python(self._refs)
                self.recording.alive[event] = tuple(
                    number
                    for number, tensor in enumerate(held)
                    if tensor is not None and number not in self._foreign
                )

    def enter(self, path: str, arguments: Any) -> None:
        """A module may use what it is given, whether or not it does so for the example."""
        super().enter(path, arguments)
        for tensor in tensors_in(arguments):
            number = self._number(tensor)
            if path and number is not None and number not in self._foreign:
                self.recording.uses.append((self.recording.count, number))

    def _note(self, tensor: Tensor, site: Site, *, ghost: bool) -> int:
        self.recording.made.append(-1 if site[:1] == ("argument",) else self.recording.count)
        self.recording.sites.append(site)
        self.recording.bytes.append(tensor.numel() * tensor.element_size())
        return super()._note(tensor, site, ghost=ghost)

    def _called(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        recording = self.recording
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        for tensor in tensors:
            self._seen(tensor, name)
        before = [times_written(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        for tensor, version in zip(tensors, before, strict=True):
            number = self._numbers[id(tensor)]
            wrote = times_written(tensor) != version
            if number in self._foreign:
                state = self._state.get(id(tensor), "")
                recording.state_uses.append((recording.count, state))
                if wrote:
                    recording.state_writes.append((recording.count, state))
            else:
                recording.uses.append((recording.count, number))
                if wrote:
                    recording.writes.append((recording.count, number))
        self._written_down(name, result)
        recording.count += 1
        return result

    def finish(self, result: Any) -> None:
        """Note what the model returns."""
        recording = self.recording
        recording.seconds = time.perf_counter() - self._start
        for tensor in all_tensors(result):
            number = self._number(tensor)
            if number is not None and number not in self._foreign:
                recording.uses.append((recording.count, number))
        recording.output = tree_map(_on_meta, result)


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    grad: bool,
    watch: Collection[str] = (),
    seed: int = 0,
) -> RecordedPass:
    """Run a copy of ``model`` on the example. Nothing of the model or of any generator changes.

    Args:
        training: in which mode.
        grad: whether gradients are on.
        watch: at calls of these modules, note what is alive.
        seed: of all generators: ranks must see the same way.

    Raises:
        CaptureError: the model can't be copied, or does not run.
    """
    twin = twin_of(model, {})
    for path, module in twin.named_modules():
        watch_calls(module, path, entering, leaving)
    tensors = [*twin.parameters(), *twin.buffers()]
    home = next((tensor.device for tensor in tensors), torch.device("cpu"))
    state = {id(tensor): name for name, tensor in _named_state(twin)}
    packet = given(*tree_map(_copied, (tuple(args), dict(kwargs))), live=True)
    recording = RecordedPass(training)
    before = generator_states()
    with (
        torch.random.fork_rng(devices=_cuda_of(tensors)),
        in_mode(twin, training),
        torch.set_grad_enabled(grad),
    ):
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        run = _Recorder(recording, watch, packet=packet, training=training, home=home, state=state)
        try:
            with calls_watched(overridden_calls(twin)), nothing_remembered(), run:
                given_args, given_kwargs = run.arguments()
                run.finish(twin(*given_args, **given_kwargs))
        finally:
            set_generators(before)
    return recording


def twin_of(model: nn.Module, instead: Mapping[int, Tensor]) -> nn.Module:
    """A copy of ``model`` with the model's own parameters, and copies of its buffers and other tensors.

    Args:
        instead: other tensors, by the identity of those that they stand for.

    Raises:
        CaptureError: it holds something that can't be copied.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for _, tensor in _named_state(model):
        if not isinstance(tensor, nn.Parameter):
            memo.setdefault(id(tensor), tensor.detach().clone())
    memo.update(instead)
    try:
        twin: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:  # whatever __deepcopy__ and __reduce__ raise
        raise CaptureError(
            f"{type(model).__name__} holds something that can't be copied ({type(error).__name__}: {error}), "
            'and frontend="modules" gives each stage a copy of the model without the others\' parameters: '
            "make it in forward, or give its class a __deepcopy__"
        ) from error
    return twin


def _named_state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters, buffers, and tensors that are plain attributes."""
    found: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for path, module in model.named_modules():
        found += [
            (f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, Tensor)
        ]
    return found


def _cuda_of(tensors: list[Tensor]) -> list[torch.device]:
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta", requires_grad=False) if isinstance(leaf, Tensor) else leaf
