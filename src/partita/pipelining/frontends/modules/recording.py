"""A pass of the example through the whole model: which module is called when, and who uses which value."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.compile.eager_stance import nothing_compiled
from partita._torch.compile.refusal import is_refusal
from partita._torch.containers.pytree import tree_map
from partita._torch.fake.ghosts import past_dispatch_modes, referenced_by_python, undisturbed
from partita._torch.fake.transforms import endings_of_transforms_seen
from partita._torch.modules.calls import (
    Around,
    calls_watched,
    inside_of_checkpoint,
    inside_of_function,
    inside_of_transform,
    overridden_calls,
    watch_calls,
)
from partita._torch.tensors.storage import is_same_view, storage_key
from partita._torch.tensors.tensor_text import tensor_text
from partita._torch.tensors.versions import times_written
from partita.capture.merging.modes import in_mode
from partita.capture.refusal import CREATED_PARAMETER
from partita.errors import CaptureError, PartitaError
from partita.pipelining.blocks.cut import BlockCut, Event, Site
from partita.pipelining.blocks.memos import memos_cleared
from partita.pipelining.blocks.packet import first_packet
from partita.pipelining.blocks.replaying.answers import all_tensors, tensors_in
from partita.pipelining.blocks.stage_module import entering, leaving, named_tensors
from partita.pipelining.blocks.stage_pass import StagePass
from partita.pipelining.frontends.modules.twin import twin_of
from partita.runtime.host_generators import generator_states, seed_generators, set_generators

__all__ = [
    "Moment",
    "RecordedPass",
    "cuda_devices",
    "fresh_leaf",
    "record",
    "written_parameter",
]

_REPLACES_DATA = "data.__set__"


@dataclass(frozen=True)
class Moment:
    """A call of a module begins or ends.

    Attributes:
        position: how many functions were called before.
        seconds: since the beginning of the pass.
    """

    event: Event
    position: int
    seconds: float


@dataclass
class RecordedPass:
    """What one pass has done. Functions are counted from 0; values have the numbers of `NumberedTensors`.

    Attributes:
        training: the mode that the model was in.
        moments: calls of modules, in order.
        producers: for each value the function that made it; -1 for the model's arguments.
        sites: for each value where it was made.
        bytes: for each value its size.
        alive: for calls that were watched, the values that Python code referred to.
        checkpointed: calls within ``torch.utils.checkpoint``.
        transformed: calls within a transform of ``torch.func``.
        functions: calls within the forward pass of a ``torch.autograd.Function``.
        uses: (function, value); a module's arguments count as used by the next function.
        writes: (function, value) where a function writes to a value that it did not make.
        state_uses: (function, name) of parameters and buffers.
        state_writes: (function, name) of buffers that a function writes to, or whose next tensor it makes,
            and of what it lets require gradients, or no longer.
        leaf_uses: (function, value) of tensors that gradients go to and that are neither parameters of the
            model nor its arguments, nor made in the pass.
        leaf_names: what these are called.
        count: how many functions were called.
        seconds: how long it took.
        output: what the model returned, on the meta device.
    """

    training: bool
    moments: list[Moment] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    alive: dict[Event, tuple[int, ...]] = field(default_factory=dict)
    checkpointed: set[Event] = field(default_factory=set)
    transformed: set[Event] = field(default_factory=set)
    functions: set[Event] = field(default_factory=set)
    uses: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    state_uses: list[tuple[int, str]] = field(default_factory=list)
    state_writes: list[tuple[int, str]] = field(default_factory=list)
    leaf_uses: list[tuple[int, int]] = field(default_factory=list)
    leaf_names: dict[int, str] = field(default_factory=dict)
    count: int = 0
    seconds: float = 0.0
    output: Any = None

    @property
    def enclosed(self) -> set[Event]:
        """The calls at which no cut may lie, within something that must lie in one stage."""
        return self.checkpointed | self.transformed | self.functions

    def written_spans(self) -> dict[str, tuple[int, int]]:
        """For each buffer that a function writes to, the first and the last function that uses it: a cut
        between them would let two stages share it.
        """
        uses: dict[str, list[int]] = {name: [] for _, name in self.state_writes}
        for position, name in self.state_uses:
            if name in uses:
                uses[name].append(position)
        return {name: (min(positions), max(positions)) for name, positions in uses.items()}

    def calls(self, path: str) -> list[int]:
        """Return the numbers of the calls of a module."""
        return [moment.event[1] for moment in self.moments if moment.event[0] == path and not moment.event[2]]


class _Recorder(StagePass):
    """Runs all of the model as one stage, and records what is called and used.

    Args:
        twin: the copy of the model that runs; the memory of its parameters is the model's.
    """

    def __init__(
        self, recording: RecordedPass, watch: Collection[str], twin: nn.Module, **options: Any
    ) -> None:
        nothing: Mapping[bool, Mapping[Any, Any]] = {True: {}, False: {}}
        super().__init__(0, BlockCut(1, nothing, {}, nothing), **options)
        self.recording = recording
        self._watch = watch
        self._parameters = {storage_key(value): name for name, value in twin.named_parameters()}
        self._buffers = {storage_key(value): name for name, value in twin.named_buffers()}
        self._own_parameters = {id(parameter) for parameter in twin.parameters()}
        self._from_elsewhere: set[int] = set()
        self._start = time.perf_counter()

    def reached(self, event: Event, home: int) -> None:  # noqa: ARG002
        seconds = time.perf_counter() - self._start
        self.recording.moments.append(Moment(event, self.recording.count, seconds))
        if inside_of_checkpoint():
            self.recording.checkpointed.add(event)
        if inside_of_transform():
            self.recording.transformed.add(event)
        if inside_of_function():
            self.recording.functions.add(event)
        if event[0] in self._watch:
            with undisturbed():
                tensors = referenced_by_python(self._tensors.references)
                self.recording.alive[event] = tuple(
                    number
                    for number, tensor in enumerate(tensors)
                    if tensor is not None and number not in self._tensors.state
                )

    def enter(self, path: str, arguments: Any) -> Around | None:
        """A module may use its arguments, whether or not it does so for the example."""
        around = super().enter(path, arguments)
        if path:
            self._record_uses(tensors_in(arguments))
        return around

    def _record_uses(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            number = self._tensors.number_of(tensor)
            if number is not None and number not in self._tensors.state:
                self.recording.uses.append((self.recording.count, number))

    def _add(self, tensor: Tensor, site: Site, *, ghost: bool) -> int:
        self.recording.producers.append(-1 if site[:1] == ("argument",) else self.recording.count)
        self.recording.sites.append(site)
        self.recording.bytes.append(tensor.numel() * tensor.element_size())
        return super()._add(tensor, site, ghost=ghost)

    def _call(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        recording = self.recording
        tensors = list(self._operands(args, kwargs))
        # ``module.to(dtype)`` in the dtype that it has sets data to itself
        replaced = args[0] if name == _REPLACES_DATA and not is_same_view(*args[:2]) else None
        if isinstance(replaced, nn.Parameter) and id(replaced) in self._state:
            raise written_parameter(self._state[id(replaced)])
        before = [times_written(tensor) for tensor in tensors]
        trained = [tensor.requires_grad for tensor in tensors]
        kept = {place: _Kept(tensor) for place, tensor in enumerate(tensors) if self._parameter_of(tensor)}
        result = func(*args, **kwargs)
        written = [
            tensor is replaced or times_written(tensor) != version
            for tensor, version in zip(tensors, before, strict=True)
        ]
        self._refuse_written_parameters(tensors, written, kept)
        self._record_leaves(tensors, result)
        for tensor, wrote, required in zip(tensors, written, trained, strict=True):
            number = self._tensors.by_identity[id(tensor)]
            if number in self._tensors.state:
                wrote = wrote or tensor.requires_grad != required
                self._record_state(self._state.get(id(tensor), ""), wrote=wrote)
                continue
            recording.uses.append((recording.count, number))
            if wrote:
                recording.writes.append((recording.count, number))
                if storage_key(tensor) in self._buffers:  # by way of buffer.data
                    self._record_state(self._buffers[storage_key(tensor)], wrote=True)
        self._recorded(name, result)
        recording.count += 1
        return result

    def _record_leaves(self, tensors: Sequence[Tensor], result: Any) -> None:
        """Record the operands from which gradients will leave the model, where a call lets any through."""
        leaves = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
        leaves = [tensor for tensor in leaves if id(tensor) not in self._own_parameters]
        if not leaves or not any(tensor.requires_grad for tensor in all_tensors(result)):
            return
        for tensor in leaves:
            number = self._tensors.by_identity[id(tensor)]
            if number in self._from_elsewhere:
                self.recording.leaf_uses.append((self.recording.count, number))
                self.recording.leaf_names[number] = (
                    repr(self._state[id(tensor)])
                    if id(tensor) in self._state
                    else f"a tensor ({tensor_text(tensor)}) that {self._module_path()} has from elsewhere"
                )

    def _add_first_seen(self, tensor: Tensor, site: Site) -> None:
        super()._add_first_seen(tensor, site)
        self._from_elsewhere.add(self._tensors.by_identity[id(tensor)])

    def _refuse_written_parameters(
        self, tensors: Sequence[Tensor], written: Sequence[bool], kept: Mapping[int, _Kept]
    ) -> None:
        """Put back all parameters that a call has written, which may be several, and raise."""
        overwritten = [place for place in kept if written[place]]
        for place in overwritten:
            kept[place].put_back()
        if overwritten:
            raise written_parameter(self._parameter_of(tensors[overwritten[0]]))

    def _parameter_of(self, tensor: Tensor) -> str:
        """The name of a parameter that the tensor shares memory with; empty where there is none."""
        return self._parameters.get(storage_key(tensor), "")

    def _record_state(self, name: str, *, wrote: bool) -> None:
        self.recording.state_uses.append((self.recording.count, name))
        if wrote:
            self.recording.state_writes.append((self.recording.count, name))

    def record_assigned(self, buffers: Mapping[str, Tensor]) -> None:
        """Record the tensors that forward has put in the place of buffers, by name."""
        recording = self.recording
        for name, tensor in buffers.items():
            number = self._tensors.by_identity.get(id(tensor))
            place = recording.count - 1 if number is None else max(recording.producers[number], 0)
            recording.state_uses.append((place, name))
            recording.state_writes.append((place, name))

    def finish(self, result: Any) -> None:
        """Record what the model returns."""
        recording = self.recording
        recording.seconds = time.perf_counter() - self._start
        self._record_uses(all_tensors(result))
        recording.output = tree_map(_on_meta, result)


class _Kept:
    """The elements of a tensor, from before a call that may write to it."""

    def __init__(self, tensor: Tensor) -> None:
        with past_dispatch_modes():
            self._there = tensor.data
            self._elements = self._there.clone()

    def put_back(self) -> None:
        """Let the tensor's memory hold them again."""
        self._there.copy_(self._elements)


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
        training: the mode.
        grad: whether gradients are on.
        watch: modules; at their calls the values that are alive are recorded.
        seed: of all generators, so that the pass takes the same way on all ranks.

    Raises:
        CaptureError: the model can't be copied, or does not run, or writes to a parameter.
    """
    twin = twin_of(model, {})
    for path, module in twin.named_modules():
        watch_calls(module, path, entering, leaving)
    tensors = [*twin.parameters(), *twin.buffers()]
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    state = {id(tensor): name for name, tensor in named_tensors(twin)}
    packet = first_packet(*tree_map(fresh_leaf, (tuple(args), dict(kwargs))), live=True)
    recording = RecordedPass(training)
    before = generator_states()
    with (
        torch.random.fork_rng(devices=cuda_devices(tensors)),
        in_mode(twin, training),
        torch.set_grad_enabled(grad),
    ):
        torch.manual_seed(seed)
        seed_generators(seed)
        recorder = _Recorder(
            recording, watch, twin, packet=packet, training=training, device=device, state=state
        )
        try:
            own_calls = calls_watched(overridden_calls(twin))
            with own_calls, memos_cleared(), nothing_compiled(), endings_of_transforms_seen(), recorder:
                twin_args, twin_kwargs = recorder.arguments()
                result = twin(*twin_args, **twin_kwargs)
                created = [name for name, one in twin.named_parameters() if id(one) not in state]
                if created:
                    raise CaptureError(f"{type(model).__name__}, {created[0]!r}: {CREATED_PARAMETER}")
                buffers = twin.named_buffers()
                recorder.record_assigned({name: now for name, now in buffers if id(now) not in state})
                recorder.finish(result)
        except PartitaError:
            raise
        except Exception as error:  # whatever the user's model raises
            raise _does_not_run(model, error, training=training, grad=grad) from error
        finally:
            set_generators(before)
    return recording


def _does_not_run(model: nn.Module, error: Exception, *, training: bool, grad: bool) -> CaptureError:
    if is_refusal(error):
        return CaptureError(
            f"{type(model).__name__} calls what torch compiles (torch.cond, scan, map, while_loop, "
            "flex_attention), and torch can't compile it while "
            'frontend="modules" watches each call: leave frontend= out, which cuts the captured graph, or '
            "branch in Python"
        )
    mode = "training" if training else f"evaluation {'with' if grad else 'without'} gradients"
    only_training = "" if training else ", or modes='train' if it is called in training only"
    return CaptureError(
        f"{type(model).__name__} itself raises {type(error).__name__} on the example in {mode} ({error}), "
        'and frontend="modules" runs it once in each mode that it is cut for: give an example that it takes'
        f"{only_training}"
    )


def written_parameter(name: str) -> CaptureError:
    """The error for a model that writes to this parameter, or replaces its data, in ``forward``."""
    return CaptureError(
        f"the model writes to its parameter {name!r} in forward, and microbatches that have yet to go "
        'backward would find the new values. In a graph they keep their own: leave out frontend="modules" '
        "where the model can be captured; else make it a buffer and write to that with copy_(), or let "
        "forward compute with a copy of it; where only its first call writes (an initialisation by the "
        "data), call the model once before you cut it"
    )


def cuda_devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    """The CUDA devices that these tensors lie on."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)


def fresh_leaf(leaf: Any) -> Any:
    """Return a copy of a tensor without its autograd graph; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _on_meta(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta", requires_grad=False) if isinstance(leaf, Tensor) else leaf
