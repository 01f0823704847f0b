"""One pass of a stage through the model's own ``forward``, from its beginning.

::

    forward of the model   ── before the stage ──┬── the stage ──┬── after it ──
    functions of torch        replayed            called          never reached: the pass stops
    tensors                   ghosts           ^  real
                                               └─ ghosts become what the stage was handed

What lies before the stage is the model's own Python and runs again, so its lists, counters and caches are
what they were on the earlier stages; only torch's functions are not called. `Replay` answers them from what
those stages recorded, including numbers that the host has read from tensors. So every stage goes the same
way, whatever the way depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partita._torch.autograd.profiling import is_read_by_profiler
from partita._torch.compile.refusal import check_compiles_nothing
from partita._torch.containers.pytree import tree_map, unflatten
from partita._torch.fake.ghosts import (
    FunctionKind,
    become,
    describe_function,
    is_ghostly,
    referenced_by_python,
    undisturbed,
)
from partita._torch.modules.calls import Around, inside_of_transform
from partita._torch.tensors.subclasses import untransformed
from partita._torch.tensors.tensor_text import tensor_text
from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.pipelining.blocks.current_pass import EndOfStage, set_current_pass
from partita.pipelining.blocks.cut import BlockCut, Event, Site
from partita.pipelining.blocks.packet import Packet, sharing_memory
from partita.pipelining.blocks.replaying.answers import (
    Answer,
    NewTensor,
    NumberedTensor,
    RaisedError,
    all_tensors,
    map_leaves,
    picklable,
    tensors_in,
)
from partita.pipelining.blocks.replaying.calls_digest import CallsDigest
from partita.pipelining.blocks.replaying.liveness import variables_read_later
from partita.pipelining.blocks.replaying.model_frames import line_of_model, variables_of_model
from partita.pipelining.blocks.replaying.numbered_tensors import NumberedTensors
from partita.pipelining.blocks.replaying.replay import NOT_RUN_HERE, Replay
from partita.pipelining.stages.other_ranks import check_ranks_come

__all__ = ["StagePass"]

_STATE: Site = ("a parameter or buffer",)
_DEVICE_FLAGS = frozenset(f"is_{kind}.__get__" for kind in ("cuda", "cpu", "meta", "mps", "xpu"))
_STATE_PROPERTIES = _DEVICE_FLAGS | {"device.__get__", "requires_grad.__get__", "is_leaf.__get__"}
"""What can be said of another stage's parameter."""


class StagePass(TorchFunctionMode):
    """One pass of one stage. Begins before the stage, in the code of stage 0.

    Args:
        stage: which one.
        cut: of the model.
        packet: what the stage was handed.
        training: the mode that the model is in.
        device: where the stage runs.
        state: the names of the model's parameters and buffers as this stage has them, by identity.
        processes: the global ranks that run the pipeline's stages, where they are processes.

    Attributes:
        output: what goes to the next stage, once the pass has stopped.
    """

    def __init__(
        self,
        stage: int,
        cut: BlockCut,
        packet: Packet,
        *,
        training: bool,
        device: torch.device,
        state: Mapping[int, str],
        processes: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.stage = stage
        self._processes = processes
        self.output: Packet | None = None
        self._code_of = 0  # the stage whose code is executed now
        self._cut = cut
        self._borders = cut.borders[training]
        self._unused = cut.unused[training]
        self._packet = packet
        self._device = device
        self._state = state
        self._answers: list[Answer] = list(packet.answers)
        self._tensors = NumberedTensors()
        self._replay = Replay(stage, self._answers, self._tensors, device)
        self._digest = CallsDigest(self._tensors, state)
        self._records = stage < cut.stages - 1  # nobody follows the last stage
        self._calls: dict[str, int] = {}
        self._path: list[Event] = []
        self._watched: dict[int, tuple[Tensor, int]] = {}
        self._stopped = False

    # What the stage is called with, and what it gives.

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments: tensors on the first stage, ghosts on the others."""
        packet, leaves = self._packet, list(self._packet.arguments)
        sites = packet.argument_sites
        tensors: list[Tensor] = []
        with undisturbed():
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, NewTensor):
                    number = len(tensors)
                    tensors.append(packet.values[number] if self.stage == 0 else leaf.ghost())
                    self._add(tensors[number], sites[number], ghost=self.stage > 0)
                    leaves[place] = tensors[number]
                elif isinstance(leaf, NumberedTensor):
                    leaves[place] = tensors[leaf.number]
            arguments: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, packet.structure)
        return arguments

    @property
    def is_in_stage(self) -> bool:
        """See `HearsCalls`."""
        return self._code_of >= self.stage and not self._stopped

    def __enter__(self) -> StagePass:
        self._outer = set_current_pass(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        set_current_pass(self._outer)
        super().__exit__(*error)

    def finish(self, result: Any) -> Any:
        """``forward`` has returned. Return the same, with the caller's own tensors where it has arguments.

        Raises:
            EndOfStage: there are stages after this one.
            ExecutionError: the result contains what no stage has handed on.
        """
        if self._stopped:
            raise ExecutionError(
                f"the model catches BaseException, which ends stage {self.stage} of the pipeline: let it "
                "catch Exception, or cut elsewhere"
            )
        self._advance(self._cut.stages - 1)
        if self._tensors.ghosts:
            for tensor in self._returned(result):
                if self._tensors.number_of(tensor) in self._tensors.ghosts:
                    raise self._missing(tensor, "the model's result")
        self._check_aliases()
        return self._with_own_arguments(result)

    def _with_own_arguments(self, result: Any) -> Any:
        own = self._packet.own_arguments

        def own_one(leaf: Any) -> Any:
            number = self._tensors.number_of(leaf) if isinstance(leaf, Tensor) else None
            return own[number] if number is not None and number < len(own) else leaf

        if all(own_one(tensor) is tensor for tensor in all_tensors(result)):
            return result
        with undisturbed():
            return tree_map(own_one, result)

    def _returned(self, result: Any) -> Iterator[Tensor]:
        """The tensors that the model returns."""
        return all_tensors(result)

    def _next_packet(self) -> Packet:
        """What goes to the next stage: of the tensors that are alive, all that a later stage may use."""
        with undisturbed():
            self._check_aliases()
            tensors = self._tensors
            values: dict[int, Tensor] = {}
            handed_on = self._handed_on()
            for number, tensor in enumerate(referenced_by_python(tensors.references)):
                if tensor is None or number in tensors.ghosts or number in tensors.state:
                    continue
                if handed_on(number):
                    values[number] = tensor
            return replace(
                self._packet,
                answers=self._answers,
                calls=self._digest.calls,
                values=values,
                sites={number: tensors.sites[number] for number in values},
                aliases=sharing_memory(values) | (self._packet.aliases & values.keys()),
            )

    def _handed_on(self) -> Callable[[int], bool]:
        """Return whether a later stage may use a value that is alive, by its number."""
        unused = self._unused.get(self.stage + 1, frozenset())
        read = self._read_later()
        return lambda number: self._tensors.sites[number] not in unused or number in read

    # Calls of modules.

    def enter(self, path: str, arguments: Any) -> Around | None:  # noqa: ARG002 - a recording looks at them
        """A module is about to be called. Return what goes around the call."""
        call = self._calls[path] = self._calls.get(path, -1) + 1
        event = (path, call, False)
        self._path.append(event)
        self.reached(event, self._cut.homes.get(path, 0))
        return None

    def leave(self, path: str) -> None:
        """A module has returned."""
        while self._path:
            left = self._path.pop()
            if left[0] == path:
                self.reached((path, left[1], True), 0)
                return

    def reached(self, event: Event, home: int) -> None:
        """Begin the stage that begins here, or ``home``: the one that the module belongs to."""
        stage = max(self._borders.get(event, 0), home)
        if stage > self._code_of:
            self._advance(stage)

    def _advance(self, stage: int) -> None:
        begins = self._code_of < self.stage <= stage
        with undisturbed():
            self._add_variables()
        self._code_of = stage
        if begins:
            self._begin()
        if stage > self.stage:
            # Now: the variables of the model's functions are released as their frames are left.
            self.output = self._next_packet()
            self._stopped = True
            raise EndOfStage

    def _add_variables(self) -> None:
        """Number the tensors in variables that do not come from a function of torch."""
        for frame, name, tensor in variables_of_model():
            if self._tensors.number_of(tensor) is None:
                self._add_first_seen(tensor, ("variable", frame.f_code.co_name, name))

    def _read_later(self) -> set[int | None]:
        """The values in variables that the model's code may still read, whichever way it goes."""
        return {
            self._tensors.number_of(tensor)
            for frame, name, tensor in variables_of_model()
            if name in variables_read_later(frame.f_code, frame.f_lasti)
        }

    def _begin(self) -> None:
        """Let the ghosts become what the stage was handed."""
        self._replay.check_complete()
        self._replay.check_equal(self._digest.calls, self._packet.calls)
        packet, tensors = self._packet, self._tensors
        with undisturbed():
            for number, value in packet.values.items():
                ghost = tensors[number] if number < len(tensors.references) else None
                if ghost is None or number not in tensors.ghosts:
                    continue
                tensors.ghosts.discard(number)
                tensors.sites[number] = site = packet.sites[number]
                own = self._owned(value, site)
                if number < packet.tensors or number in packet.aliases:
                    # writes to its memory count here too, also when the model has let go of it
                    self._watched[number] = own.detach(), times_written(own)
                become(ghost, own)

    def _owned(self, value: Tensor, site: Site) -> Tensor:
        """A tensor that nobody else refers to. Gradients arrive at ``value``, after all of this stage's."""
        if self._cut.is_written(site) and not self._packet.live:
            with torch.set_grad_enabled(value.requires_grad):
                return value.clone()
        if not value.requires_grad:
            return value.detach()
        with torch.enable_grad():
            return value.view_as(value)

    # Functions of torch.

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind, name = describe_function(func)
        check_compiles_nothing(func, args)
        if kind is FunctionKind.METADATA or kind is FunctionKind.SETTING:
            return func(*args, **kwargs)
        if name == "grad.__get__" and is_read_by_profiler():
            return func(*args, **kwargs)
        if self._stopped:
            raise EndOfStage
        before = self._code_of < self.stage
        if not before and name in _STATE_PROPERTIES and self._is_state_elsewhere(args[0]):
            return self._property_elsewhere(func, name, args[0])
        operands = list(self._operands(args, kwargs))
        for tensor in operands:
            self._check_here(tensor, name)
        if (self._records or before) and name not in _STATE_PROPERTIES and not inside_of_transform():
            self._digest.note(name, operands, args, kwargs)
        return self._replay.answer(name) if before else self._call(func, name, args, kwargs)

    def _operands(self, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors that a function is called with; within a transform of ``torch.func`` also those of the
        pass that it has wrapped.
        """
        tensors = tensors_in((*args, kwargs) if kwargs else args)
        if not inside_of_transform():
            yield from tensors
            return
        for tensor in tensors:
            yield tensor
            inner = untransformed(tensor)
            is_met = id(inner) in self._state or self._tensors.number_of(inner) is not None
            if inner is not tensor and is_met:
                yield inner

    def _call(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """In the stage: call ``func``, and record what it returns."""
        if self._processes:
            check_ranks_come(
                func, args, kwargs, self._processes, f"{self._module_path()}, stage {self.stage}"
            )
        if not self._records:
            return func(*args, **kwargs)
        writes = name[-1] == "_" or name.endswith("__set__")
        before = NewTensor.of(args[0]) if writes and args and isinstance(args[0], Tensor) else None
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._answers.append((name, RaisedError(error), None))
            raise
        changes = None
        if before is not None and (after := NewTensor.of(args[0])) != before:
            changes = {self._tensors.by_identity[id(args[0])]: after}
        self._answers.append((name, self._recorded(name, result), changes))
        return result

    def _recorded(self, name: str, result: Any) -> Any:
        place: Site = ()
        count = 0

        def leaf(value: Any) -> Any:
            nonlocal count, place
            if not isinstance(value, Tensor):
                return picklable(value, self._device)
            number = self._tensors.number_of(value)
            if number is not None:
                return NumberedTensor(number)
            place = place or self._site(name)
            count += 1
            self._add(value, (*place, count), ghost=False)
            return NewTensor.of(value)

        return leaf(result) if isinstance(result, Tensor) else map_leaves(leaf, result)

    def _site(self, name: str) -> Site:
        return (self._path[-1][:2] if self._path else (), *line_of_model(), name)

    def _is_state_elsewhere(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer of another stage, which is a ghost here."""
        return self._device.type != "meta" and is_ghostly(tensor) and id(tensor) in self._state

    def _property_elsewhere(self, func: Callable[..., Any], name: str, tensor: Tensor) -> Any:
        """A property of another stage's parameter, as if it lay where this stage lies."""
        if self._tensors.number_of(tensor) is None:
            self._tensors.state.add(self._add(tensor, _STATE, ghost=False))
        if name == "device.__get__":
            result: Any = torch.device(str(self._device))  # a new object, as torch gives it: see `Replay`
        elif name in _DEVICE_FLAGS:
            result = name == f"is_{self._device.type}.__get__"
        else:
            result = func(tensor)
        if self._records:
            self._answers.append((name, picklable(result, self._device), None))
        return result

    def _add(self, tensor: Tensor, site: Site, *, ghost: bool) -> int:
        return self._tensors.add(tensor, site, ghost=ghost)

    def _add_first_seen(self, tensor: Tensor, site: Site) -> None:
        """Number a tensor that the model has from elsewhere than a function of torch."""
        is_state = id(tensor) in self._state or isinstance(tensor, nn.Parameter)
        ghost = is_ghostly(tensor) and self._device.type != "meta" and not is_state
        number = self._add(tensor, _STATE if is_state else site, ghost=ghost)
        if is_state:
            self._tensors.state.add(number)

    def _check_here(self, tensor: Tensor, name: str) -> None:
        """Number what is met for the first time; in the stage, refuse ghosts."""
        number = self._tensors.number_of(tensor)
        in_stage = self._code_of >= self.stage
        if number is not None:
            if in_stage and number in self._tensors.ghosts:
                raise self._missing(tensor, f"{name}()")
            return
        if in_stage and is_ghostly(tensor) and self._device.type != "meta":
            raise self._missing(tensor, f"{name}()")
        has_site = in_stage and id(tensor) not in self._state
        self._add_first_seen(tensor, self._site(name) if has_site else NOT_RUN_HERE)

    # Refusals.

    def _module_path(self) -> str:
        return (self._path[-1][0] if self._path else "") or "the model's forward"

    def _missing(self, tensor: Tensor, user: str) -> ExecutionError:
        looks = tensor_text(tensor)
        name = self._state.get(id(tensor))
        if name is not None:
            return ExecutionError(
                f"{user} of stage {self.stage} uses {name!r} ({looks}), which belongs to another stage: the "
                "example did not use it there. Cut with an example that does, or at other modules"
            )
        return ExecutionError(
            f"{user} in {self._module_path()}, stage {self.stage}, uses a tensor ({looks}) that an earlier "
            "stage has made and not handed on: with the example that the model was cut with, no later stage "
            "used it. Cut it with an example that goes the same way as these inputs, or at other modules"
        )

    def _check_aliases(self) -> None:
        """Raise ExecutionError where the stage has written to memory that other stages have as well. In one
        process the caller sees what is written to arguments; two tensors in one memory are refused there too,
        where a cut is proven.
        """
        for number, (tensor, version) in self._watched.items():
            is_argument = number < self._packet.tensors
            if times_written(tensor) == version or (is_argument and self._packet.live):
                continue
            what = f"argument {number}" if is_argument else "one of two tensors in one memory"
            raise ExecutionError(
                f"stage {self.stage} writes to {what} ({list(tensor.shape)}), which an earlier stage has "
                "handed on: the others would not see it. Cut so that one stage makes and writes to it, or "
                "let the model write to a copy (.clone())"
            )
