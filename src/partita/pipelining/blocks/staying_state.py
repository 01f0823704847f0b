"""Objects that a model changes from call to call, such as a cache of keys and values, cut along its stages.

Each stage has a copy of each object. What its own part of the model has written there is real; everything
else looks right and takes no memory::

    rank 0   layers[0] = real    layers[1] = ghost      written by layer 0, which runs here
    rank 1   layers[0] = ghost   layers[1] = real       written by layer 1

After its pass a stage says what has changed (`StayingState.changes`): numbers and small tensors as they are,
other tensors as what they look like. The others enter it, so that lengths are right everywhere and the
model's code goes the same way on each stage, while large tensors never leave theirs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from partita._torch.fake.ghosts import is_ghostly, undisturbed
from partita._torch.tensors.versions import times_written
from partita.errors import ExecutionError
from partita.pipelining.blocks.replaying.answers import NewTensor, StageDevice, picklable

__all__ = ["StateChange", "StayingObject", "StayingState"]

_SMALL = 16
"""Tensors of so many integers, such as a length, are sent as they are."""
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_OPAQUE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.Generator)

Path = tuple[Any, ...]
"""The name of an object, then attributes, keys and places."""


@dataclass(frozen=True, slots=True)
class StayingObject:
    """Stands for a staying object where it is an argument or a result: each stage has its own."""

    name: str


@dataclass(frozen=True, slots=True)
class StateChange:
    """What is new at one place.

    Attributes:
        path: where.
        value: a `NewTensor` (a ghost elsewhere), a small tensor, what is no tensor, or a `_NewObject`.
    """

    path: Path
    value: Any


@dataclass(frozen=True, slots=True)
class _NewObject:
    """An object that was not there, without its large tensors.

    Attributes:
        content: its pickle.
    """

    content: bytes


@dataclass(frozen=True, slots=True)
class _Gone:
    """Stands for what was removed, or is not there."""


_GONE = _Gone()


class StayingState:
    """The staying objects of one series of calls on one stage.

    Args:
        objects: by name.
        device: of the stage.
    """

    def __init__(self, objects: Mapping[str, Any], device: torch.device) -> None:
        self.objects = dict(objects)
        self._device = device
        self._slots: list[_Slot] = []
        self._sizes: list[tuple[Any, int]] = []
        self._look_at_all()

    def begin(self) -> None:
        """What changes from now on is the doing of this stage's part of the model."""
        with undisturbed():
            if self._changed() is None:
                self._look_at_all()

    def changes(self) -> tuple[StateChange, ...]:
        """Return what this stage has changed since `begin`, or since this was called last.

        Raises:
            ExecutionError: it has put something in there that can't be pickled.
        """
        with undisturbed():
            changed = self._changed()
            gone: list[StateChange] = []
            if changed is None:  # objects have come or gone
                before = {slot.path: slot.look for slot in self._slots}
                self._look_at_all()
                changed = [slot for slot in self._slots if before.get(slot.path, _GONE) != slot.look]
                now = {slot.path for slot in self._slots}
                gone = [StateChange(path, _GONE) for path in before if path not in now]
            changes = []
            sent: Path = ("",)  # the object that was described last, with all that is in it
            for slot in changed:
                if slot.path[: len(sent)] == sent:
                    continue
                changes.append(StateChange(slot.path, self._described(slot)))
                if isinstance(slot.look, _Container):
                    sent = slot.path
        return (*changes, *gone)

    def apply(self, changes: tuple[StateChange, ...]) -> None:
        """Enter what another stage has changed. `begin` comes next, before anything else changes."""
        with undisturbed():
            for change in changes:
                *way, last = change.path
                owner: Any = self.objects
                for key in way:
                    owner = _child(owner, key)
                    if isinstance(owner, _Gone):
                        break
                else:
                    self._enter(owner, last, change.value)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor was in the objects at the last `begin` or `changes`."""
        return any(slot.value is tensor for slot in self._slots)

    def bytes(self) -> int:
        """The memory of the tensors that are on this stage, each storage once."""
        self.begin()
        with undisturbed():
            storages = {
                storage.data_ptr(): storage.nbytes()
                for tensor in [slot.value for slot in self._slots if isinstance(slot.value, Tensor)]
                if not is_ghostly(tensor) and tensor.layout == torch.strided
                for storage in [tensor.untyped_storage()]
            }
        return sum(storages.values())

    def name_of(self, value: Any) -> str | None:
        """The name under which a value is one of the objects."""
        return next((name for name, staying in self.objects.items() if staying is value), None)

    # Places.

    def _look_at_all(self) -> None:
        self._slots, self._sizes = [], []
        seen: set[int] = set()
        with undisturbed():
            for name in self.objects:
                self._visit(self.objects, name, (name,), seen)

    def _visit(self, owner: Any, key: Any, path: Path, seen: set[int]) -> None:
        value = owner[key]
        slot = _Slot(owner, key, path, value)
        self._slots.append(slot)
        if isinstance(slot.look, _Container) and id(value) not in seen:
            seen.add(id(value))
            inner = value if isinstance(value, (dict, list, tuple)) else vars(value)
            self._sizes.append((inner, len(inner)))
            for inner_key in list(inner) if isinstance(inner, dict) else range(len(inner)):
                self._visit(inner, inner_key, (*path, inner_key), seen)

    def _changed(self) -> list[_Slot] | None:
        """Look again at each place: those that look otherwise; None where objects have come or gone."""
        if any(len(inner) != size for inner, size in self._sizes):
            return None
        changed = []
        for slot in self._slots:
            try:
                value = slot.owner[slot.key]
            except (KeyError, IndexError):
                return None
            if value is slot.value and not (slot.small and times_written(value) != slot.version):
                continue
            before = slot.look
            if isinstance(before, _Container):
                return None
            slot.take(value)
            if isinstance(slot.look, _Container):
                slot.look = before
                return None
            if slot.look != before:
                changed.append(slot)
        return changed

    # Values.

    def _described(self, slot: _Slot) -> Any:
        value, look = slot.value, slot.look
        if isinstance(value, Tensor):
            if is_ghostly(value) and self._device.type != "meta":
                return NewTensor.of(value)  # the model's own code has put it there, as on the other stages
            return value.detach().clone() if slot.small else NewTensor.of(value)
        if not isinstance(look, _Container):
            return value if isinstance(value, (str, bytes, tuple)) else picklable(value, self._device)
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._device).dump(value)
        except Exception as error:  # pickle raises what __reduce__ raises
            raise ExecutionError(
                f"{_text(slot.path)}, which the model has made in what stays on its stage, is a "
                f"{type(value).__name__} that can't be pickled for the other stages "
                f"({type(error).__name__}: {error}): make it before the first call, or of plain values"
            ) from error
        return _NewObject(buffer.getvalue())

    def _enter(self, owner: Any, key: Any, value: Any) -> None:
        if isinstance(value, _Gone):
            _remove(owner, key)
            return
        if isinstance(value, NewTensor):
            old = _child(owner, key)
            if isinstance(old, Tensor) and is_ghostly(old) and NewTensor.of(old) == value:
                return
            value = value.ghost()
        elif isinstance(value, Tensor):
            value = value.detach().to(self._device, copy=True)
        elif isinstance(value, _NewObject):
            value = _Unpickler(io.BytesIO(value.content), self._device).load()
        elif isinstance(value, StageDevice):
            value = torch.device(str(self._device))
        _set(owner, key, value)


@dataclass(frozen=True, slots=True)
class _Container:
    """What a container looks like.

    Attributes:
        kind: its class.
        identity: of a tuple, which can't be changed but replaced.
    """

    kind: type
    identity: int = 0


class _Slot:
    """One place in an object, and what was there when somebody looked last."""

    __slots__ = ("key", "look", "owner", "path", "small", "value", "version")

    def __init__(self, owner: Any, key: Any, path: Path, value: Any) -> None:
        self.owner = owner
        self.key = key
        self.path = path
        self.take(value)

    def take(self, value: Any) -> None:
        """Look at what is there now."""
        self.value = value
        self.small, self.version = False, 0
        if isinstance(value, Tensor):
            self.look: Any = NewTensor.of(value)
            if _is_small(value):
                self.small, self.version = True, times_written(value)
                self.look = (self.look, id(value), self.version)
        elif _is_atom(value) or (isinstance(value, tuple) and all(map(_is_atom, value))):
            self.look = value
        elif isinstance(value, (dict, list)):
            self.look = _Container(type(value))
        elif isinstance(value, tuple):
            self.look = _Container(type(value), id(value))
        elif isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
            self.look = id(value)
        else:
            self.look = _Container(type(value))


def _child(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return owner.get(key, _GONE)
    if isinstance(owner, (list, tuple)):
        return owner[key] if key < len(owner) else _GONE
    return vars(owner).get(key, _GONE)


def _set(owner: Any, key: Any, value: Any) -> None:
    if isinstance(owner, list) and key == len(owner):
        owner.append(value)
    elif isinstance(owner, (dict, list)):
        owner[key] = value
    elif isinstance(owner, tuple):
        raise ExecutionError(
            f"a tensor in a tuple (place {key}) of what stays on its stage was changed: keep it in a list "
            "or an attribute, which can be changed on every stage"
        )
    else:
        vars(owner)[key] = value


def _remove(owner: Any, key: Any) -> None:
    if isinstance(owner, dict):
        owner.pop(key, None)
    elif isinstance(owner, list):
        del owner[key:]
    elif not isinstance(owner, tuple):
        vars(owner).pop(key, None)


def _is_small(tensor: Tensor) -> bool:
    return (
        tensor.numel() <= _SMALL
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and not is_ghostly(tensor)
    )


def _is_atom(value: Any) -> bool:
    return isinstance(value, _ATOMS)


def _text(path: Path) -> str:
    return ".".join(map(str, path))


class _Pickler(pickle.Pickler):
    """Leaves large tensors out: what they look like goes in their place."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._device = device

    def persistent_id(self, obj: Any) -> Any:
        """What goes in the place of ``obj``; None: itself."""
        if isinstance(obj, Tensor):
            return None if _is_small(obj) else NewTensor.of(obj)
        if isinstance(obj, torch.device):
            return StageDevice() if obj == self._device else None
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        """What stands for a tensor or a device."""
        return pid.ghost() if isinstance(pid, NewTensor) else torch.device(str(self._device))
