"""One pass of a stage through the model's own ``forward``, from its beginning.

::

    forward of the model   ── before the stage ──┬── the stage ──┬── after it ──
    functions of torch        answered            run             never reached: the pass stops
    tensors                   ghosts           ^  real
                                               └─ ghosts become what the stage was handed

What lies before the stage is the model's own Python, so its lists, counters and caches become what they
became where it ran; only torch's functions are not called. They are answered from what the stages that have
called them wrote down, numbers that the host has read included. So every stage goes the same way, whatever
the way depends on.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partita._torch.containers.pytree import unflatten
from partita._torch.fake.ghosts import (
    FunctionKind,
    become,
    caller,
    describe_function,
    ghost_of,
    held_by_python,
    is_ghostly,
    undisturbed,
)
from partita._torch.modules.calls import watch_calls
from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.pipelining.blocks.answers import (
    Answer,
    Home,
    Known,
    New,
    RaisedHere,
    map_leaves,
    plain,
    tensors_in,
)
from partita.pipelining.blocks.cut import BlockCut, Event, Site
from partita.pipelining.blocks.liveness import variables_read_later
from partita.pipelining.blocks.packet import Packet

__all__ = ["Run", "Stop", "all_tensors", "current_run"]

_UNSEEN: Site = ("not run here",)
_STATE: Site = ("a parameter or buffer",)
_DEVICES = frozenset(f"is_{kind}.__get__" for kind in ("cuda", "cpu", "meta", "mps", "xpu"))
_LOOKS = _DEVICES | {"device.__get__", "requires_grad.__get__", "is_leaf.__get__"}
_OWN_FILES = frozenset(
    [str(path) for path in Path(__file__).parent.glob("*.py")]
    + [str(module.__file__) for module in (torch.overrides, torch.functional, torch.nn.functional)]
)
"""What stands between the model's code and a function that is caught."""
_CALLS = {str(nn.Module.__call__.__code__.co_filename), str(watch_calls.__code__.co_filename)}
_BEGINNING = (str(Path(__file__).with_name("stage_module.py")), "forward")
_NONE: frozenset[Site] = frozenset()


class Stop(BaseException):
    """Leaves ``forward`` at the end of a stage. No ``except Exception`` of the model catches it."""


class _Current(threading.local):
    run: Run | None = None


_current = _Current()


def current_run() -> Run | None:
    """The pass that this thread is in."""
    return _current.run


class Run(TorchFunctionMode):
    """One pass of one stage.

    Args:
        stage: which one.
        cut: of the model.
        packet: what the stage was handed.
        training: the mode that the model is in.
        home: where the stage runs.
        state: the names of the model's parameters and buffers as this stage has them, by identity.

    Attributes:
        made: what goes to the next stage, once the pass has stopped.
    """

    _own_files: frozenset[str] = _OWN_FILES

    def __init_subclass__(cls) -> None:
        cls._own_files = cls._own_files | {str(sys.modules[cls.__module__].__file__)}

    def __init__(
        self,
        stage: int,
        cut: BlockCut,
        packet: Packet,
        *,
        training: bool,
        home: torch.device,
        state: Mapping[int, str],
    ) -> None:
        super().__init__()
        self.stage = stage
        self.phase = 0
        self._cut = cut
        self._borders = cut.borders[training]
        self._idle = cut.idle[training]
        self._packet = packet
        self._home = home
        self._state = state
        self._answers: list[Answer] = list(packet.answers)
        self._cursor = 0
        self._writes = stage < cut.stages - 1  # nobody follows the last stage
        self._calls: dict[str, int] = {}
        self._path: list[Event] = []
        self._refs: list[weakref.ref[Tensor]] = []
        self._sites: list[Site] = []
        self._ghosts: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._foreign: set[int] = set()
        self._versions: dict[int, int] = {}
        self._stopped = False
        self.made: Packet | None = None

    # What the stage is called with, and what it gives.

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments: tensors on the first stage, ghosts on the others."""
        number = -1

        def leaf(value: Any) -> Any:
            nonlocal number
            if not isinstance(value, New):
                return value
            number += 1
            tensor = self._packet.values[number] if self.stage == 0 else self._ghost(value)
            self._note(tensor, ("argument", number), ghost=self.stage > 0)
            return tensor

        packet = self._packet
        with undisturbed():
            leaves = [leaf(value) for value in packet.arguments]
            arguments: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(leaves, packet.structure)
        return arguments

    def __enter__(self) -> Run:
        self._outer, _current.run = _current.run, self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _current.run = self._outer
        super().__exit__(*error)

    def finish(self, result: Any) -> None:
        """``forward`` has returned.

        Raises:
            Stop: there are stages after this one.
            ExecutionError: the result holds what no stage has handed on.
        """
        if self._stopped:
            raise ExecutionError(
                f"the model catches BaseException, which ends stage {self.stage} of the pipeline: let it "
                "catch Exception, or cut elsewhere"
            )
        self._advance(self._cut.stages - 1)
        if self._ghosts:
            for tensor in all_tensors(result):
                self._check_there(tensor, "the model's result")
        self._check_aliases()

    def _packet_of_alive(self) -> Packet:
        """What goes to the next stage: of what is alive, all that a later stage may use."""
        with undisturbed():
            self._check_aliases()
            values: dict[int, Tensor] = {}
            sites: dict[int, Site] = {}
            places: dict[int, list[int]] = {}
            idle = self._idle.get(self.stage + 1, _NONE)
            read = self._read_later()
            for number, tensor in enumerate(held_by_python(self._refs)):
                if tensor is None or number in self._ghosts or number in self._foreign:
                    continue
                site = self._sites[number]
                if site not in idle or number in read:
                    values[number], sites[number] = tensor, site
                    if tensor.layout == torch.strided:
                        places.setdefault(tensor.untyped_storage().data_ptr(), []).append(number)
            places.pop(0, None)
            shared = {number for group in places.values() if len(group) > 1 for number in group}
            shared |= self._packet.aliases & values.keys()
            return replace(
                self._packet,
                answers=self._answers,
                values=values,
                sites=sites,
                aliases=frozenset(shared),
            )

    # Calls of modules.

    def enter(self, path: str, arguments: Any) -> None:  # noqa: ARG002 - for who records
        """A module is about to be called."""
        call = self._calls[path] = self._calls.get(path, -1) + 1
        event = (path, call, False)
        self._path.append(event)
        self.reached(event, self._cut.homes.get(path, 0))

    def leave(self, path: str) -> None:
        """A module has returned."""
        while self._path:
            left = self._path.pop()
            if left[0] == path:
                self.reached((path, left[1], True), 0)
                return

    def reached(self, event: Event, home: int) -> None:
        """Begin the stage that begins here, or that the module belongs to."""
        stage = max(self._borders.get(event, 0), home)
        if stage > self.phase:
            self._advance(stage)

    def _advance(self, phase: int) -> None:
        begins = self.phase < self.stage <= phase
        with undisturbed():
            self._note_variables()
        self.phase = phase
        if begins:
            self._begin()
        if phase > self.stage:
            # Now: what lies on the stacks of the model's functions is let go of as they are left.
            self.made = self._packet_of_alive()
            self._stopped = True
            raise Stop

    def _variables(self) -> Iterator[tuple[FrameType, str, Tensor]]:
        """The tensors in variables of the model's functions that are under way."""
        frame = caller(1)
        while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != _BEGINNING:
            if frame.f_code.co_filename not in self._own_files | _CALLS:
                for name, value in frame.f_locals.items():
                    for tensor in tensors_in(value):
                        yield frame, name, tensor
            frame = frame.f_back

    def _note_variables(self) -> None:
        """Number what the model holds in variables and has from elsewhere than a function that is caught."""
        for frame, name, tensor in self._variables():
            if self._number(tensor) is None:
                self._first_seen(tensor, ("variable", frame.f_code.co_name, name))

    def _read_later(self) -> set[int]:
        """The values in variables that the model's code may still read, whichever way it goes."""
        found = set()
        for frame, name, tensor in self._variables():
            if name in variables_read_later(frame.f_code, frame.f_lasti):
                number = self._number(tensor)
                if number is not None:
                    found.add(number)
        return found

    def _first_seen(self, tensor: Tensor, site: Site) -> None:
        held = id(tensor) in self._state or isinstance(tensor, nn.Parameter)
        ghost = is_ghostly(tensor) and self._home.type != "meta" and not held
        number = self._note(tensor, _STATE if held else site, ghost=ghost)
        if held:
            self._foreign.add(number)

    def _begin(self) -> None:
        """Let the ghosts become what the stage was handed."""
        if self._cursor != len(self._answers):
            raise self._lost("reaches this stage", self._answers[self._cursor][0])
        packet = self._packet
        with undisturbed():
            for number, value in packet.values.items():
                ghost = self._refs[number]() if number < len(self._refs) else None
                if ghost is None or number not in self._ghosts:
                    continue
                self._ghosts.discard(number)
                self._sites[number] = site = packet.sites[number]
                become(ghost, self._arrived(value, site))
                if number < packet.tensors or number in packet.aliases:
                    self._versions[number] = times_written(ghost)

    def _arrived(self, value: Tensor, site: Site) -> Tensor:
        """A tensor that nobody else refers to. Gradients arrive at ``value``, after all of this stage's."""
        if site in self._cut.written and not self._packet.live:
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
        if kind is FunctionKind.METADATA or kind is FunctionKind.SETTING:
            return func(*args, **kwargs)
        if self._stopped:
            raise Stop
        if self.phase < self.stage:
            return self._answered(name, args, kwargs)
        if name in _LOOKS and self._is_elsewhere(args[0]):
            return self._looked_at(func, name, args[0])
        return self._called(func, name, args, kwargs)

    def _called(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """In the stage: run it, and write down what it answers."""
        for tensor in tensors_in(args):
            self._seen(tensor, name)
        if kwargs:
            for tensor in tensors_in(kwargs):
                self._seen(tensor, name)
        if not self._writes:
            return func(*args, **kwargs)
        changing = name[-1] == "_" or name.endswith("__set__")
        before = New.of(args[0]) if changing and args and isinstance(args[0], Tensor) else None
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._answers.append((name, RaisedHere(error), None))
            raise
        changes = None
        if before is not None and (after := New.of(args[0])) != before:
            changes = {self._numbers[id(args[0])]: after}
        self._answers.append((name, self._written_down(name, result), changes))
        return result

    def _written_down(self, name: str, result: Any) -> Any:
        place: Site = ()
        count = 0

        def leaf(value: Any) -> Any:
            nonlocal count, place
            if not isinstance(value, Tensor):
                return plain(value, self._home)
            number = self._number(value)
            if number is not None:
                return Known(number)
            place = place or self._place(name)
            count += 1
            self._note(value, (*place, count), ghost=False)
            return New.of(value)

        return leaf(result) if isinstance(result, Tensor) else map_leaves(leaf, result)

    def _place(self, name: str) -> Site:
        """Where the model's code is."""
        frame = caller(1)
        while frame is not None and frame.f_code.co_filename in self._own_files:
            frame = frame.f_back
        assert frame is not None
        return (self._path[-1][:2] if self._path else (), frame.f_code.co_name, frame.f_lineno, name)

    def _answered(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the stage: what it answered where it ran."""
        for tensor in tensors_in(args):
            self._seen(tensor, name)
        if kwargs:
            for tensor in tensors_in(kwargs):
                self._seen(tensor, name)
        if self._cursor >= len(self._answers):
            raise self._lost(f"calls {name}", "the stage's beginning")
        called, answer, changes = self._answers[self._cursor]
        if called != name:
            raise self._lost(f"calls {name}", called)
        self._cursor += 1
        if changes:
            for number, looks in changes.items():
                tensor = self._refs[number]()
                if tensor is not None and number in self._ghosts:
                    become(tensor, self._ghost(looks))
        if isinstance(answer, RaisedHere):
            raise answer.error
        return self._read(answer) if isinstance(answer, (New, Known)) else map_leaves(self._read, answer)

    def _read(self, leaf: Any) -> Any:
        if isinstance(leaf, New):
            ghost = self._ghost(leaf)
            self._note(ghost, _UNSEEN, ghost=True)
            return ghost
        if isinstance(leaf, Known):
            tensor = self._refs[leaf.number]()
            if tensor is None:
                raise self._lost("holds", f"value {leaf.number}, which this one has let go of")
            return tensor
        return self._here() if isinstance(leaf, Home) else leaf

    # Numbers of tensors.

    def _ghost(self, looks: New) -> Tensor:
        return ghost_of(looks.shape, looks.stride, looks.dtype)

    def _number(self, tensor: Tensor) -> int | None:
        number = self._numbers.get(id(tensor))
        return number if number is not None and self._refs[number]() is tensor else None

    def _note(self, tensor: Tensor, site: Site, *, ghost: bool) -> int:
        number = len(self._refs)
        self._refs.append(weakref.ref(tensor))
        self._sites.append(site)
        self._numbers[id(tensor)] = number
        if ghost:
            self._ghosts.add(number)
        return number

    def _seen(self, tensor: Tensor, name: str) -> None:
        """Number what is met for the first time; in the stage, refuse what is not there."""
        number = self._number(tensor)
        here = self.phase >= self.stage
        if number is not None:
            if here and number in self._ghosts:
                raise self._missing(tensor, f"{name}()")
            return
        if here and is_ghostly(tensor) and self._home.type != "meta":
            raise self._missing(tensor, f"{name}()")
        self._first_seen(tensor, self._place(name) if here else _UNSEEN)

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer of another stage: only its looks are known here."""
        return self._home.type != "meta" and is_ghostly(tensor) and id(tensor) in self._state

    def _here(self) -> torch.device:
        """The device, a new object each time, as torch gives it: pickled values tell the two apart."""
        return torch.device(str(self._home))

    def _looked_at(self, func: Callable[..., Any], name: str, tensor: Tensor) -> Any:
        """In the stage: what can be said of another stage's parameter. It lies where this stage lies."""
        if self._number(tensor) is None:
            self._foreign.add(self._note(tensor, _STATE, ghost=False))
        if name == "device.__get__":
            result: Any = self._here()
        elif name in _DEVICES:
            result = name == f"is_{self._home.type}.__get__"
        else:
            result = func(tensor)
        if self._writes:
            self._answers.append((name, plain(result, self._home), None))
        return result

    # Refusals.

    def _check_there(self, tensor: Tensor, user: str) -> None:
        number = self._number(tensor)
        if number is not None and number in self._ghosts:
            raise self._missing(tensor, user)

    def _missing(self, tensor: Tensor, user: str) -> ExecutionError:
        looks = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        name = self._state.get(id(tensor))
        if name is not None:
            return ExecutionError(
                f"{user} of stage {self.stage} uses {name!r} ({looks}), which belongs to another stage: the "
                "example did not use it there. Cut with an example that does, or at other modules"
            )
        where = (self._path[-1][0] if self._path else "") or "the model's forward"
        return ExecutionError(
            f"{user} in {where}, stage {self.stage}, uses a tensor ({looks}) that an earlier stage has made "
            "and not handed on: with the example that the model was cut with, no later stage used it. Cut it "
            "with an example that goes the same way as these inputs, or at other modules"
        )

    def _lost(self, here: str, there: str) -> ExecutionError:
        return ExecutionError(
            f"the model's forward goes another way on stage {self.stage} than on those before it: it {here} "
            f"where they had {there}. What it decides by must be its arguments, values of tensors, or what "
            "it keeps alike on all stages: see that no attribute that it reads before a cut is changed "
            "after one"
        )

    def _check_aliases(self) -> None:
        """Nobody has written to what shares memory that the others have as well."""
        if self._packet.live:
            return
        for number, version in self._versions.items():
            tensor = self._refs[number]()
            if tensor is None or times_written(tensor) == version:
                continue
            what = (
                f"argument {number}" if number < self._packet.tensors else "one of two tensors in one memory"
            )
            raise ExecutionError(
                f"stage {self.stage} writes to {what} ({list(tensor.shape)}), which an earlier stage has "
                "handed on: the others would not see it. Cut so that one stage makes and writes to it, or "
                "let the model write to a copy (.clone())"
            )


def all_tensors(value: Any, depth: int = 6) -> Any:
    """The tensors in a result of any class."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from all_tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from all_tensors(item, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        for item in vars(value).values():
            yield from all_tensors(item, depth - 1)
