"""A checkpoint that is being read: the names that it has, and their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from partita._torch.distributed.checkpoint_metadata import storage_place
from partita._torch.tensors.storage import has_memory
from partita.errors import CheckpointError, PartitaError
from partita.listing import listed
from partita.pipelining.checkpoints.contents.extra_state import stored_parts, value_of_parts
from partita.pipelining.checkpoints.contents.optimizer_state import state_places
from partita.pipelining.checkpoints.contents.replicas import under
from partita.pipelining.checkpoints.contents.wrapped_tensors import (
    WRAPPER,
    description,
    is_wrapper,
    parts_of,
)
from partita.pipelining.checkpoints.files.checked_reader import CheckedReader, PlainPlanner
from partita.pipelining.checkpoints.files.plain_values import plain_value
from partita.pipelining.checkpoints.together.torch_messages import quiet_alone, reason
from partita.pipelining.stages.placing.state_of_stage import StateValue, is_opaque

__all__ = ["EXTRA", "CheckpointSource", "Incoming", "StoredTensor"]

Incoming = list[tuple[Tensor, Tensor]]
"""Tensors of a model, each with its new value."""

EXTRA = "partita_extra"
"""The section of the user's own values."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its shape, its dtype, and where its bytes lie, by which ties are known."""

    size: torch.Size
    dtype: torch.dtype
    bytes_at: frozenset[tuple[str, int, int]]


class CheckpointSource:
    """A checkpoint that is being read.

    Args:
        path: its directory.
        allow_pickle: unpickle what is no plain data.

    Attributes:
        identity: differs between any two checkpoints.
        steps: how many steps the schedule had made; None where the checkpoint does not say.

    Raises:
        CheckpointError: the directory can't be read.
    """

    def __init__(self, path: str, *, allow_pickle: bool = False) -> None:
        self.path = path
        self.allow_pickle = allow_pickle
        self._reader = CheckedReader(path, allow_pickle=allow_pickle)
        metadata = self._reader.read_metadata()
        self._there = metadata.state_dict_metadata
        self._paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
        self.identity = self._reader.identity
        manifest = self._reader.manifest
        self.steps = None if manifest is None else manifest.steps

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors of the checkpoint, of all its sections, by their names in it."""
        places: dict[str, set[tuple[str, int, int]]] = {}
        for index, info in self._reader.read_metadata().storage_data.items():
            places.setdefault(index.fqn, set()).add(storage_place(info))
        return {
            name: StoredTensor(value.size, value.properties.dtype, frozenset(places.get(name, ())))
            for name, value in self._there.items()
            if isinstance(value, TensorStorageMetadata)
        }

    def values_without_shape(self) -> list[str]:
        """The names of what is no tensor, of all sections."""
        return [name for name, value in self._there.items() if not isinstance(value, TensorStorageMetadata)]

    def find(
        self, state: Sequence[StateValue], key: str, *, cast: bool
    ) -> tuple[list[tuple[str, Tensor]], list[str]]:
        """Find the tensors of a model, and check their shapes and dtypes. Of extra state: is it there?

        Returns:
            The checkpoint's names, each with the tensor that it is for (two stages of this process may have a
            copy each); and the names that it does not have.
        """
        wanted: list[tuple[str, Tensor]] = []
        missing: dict[str, None] = {}
        entries = [entry for entry in state if not is_opaque(entry)]
        self._check_wrappers(entries, key)
        for part in chain.from_iterable(map(parts_of, entries)):
            place = self._place(part.names, key)
            if place is None:
                missing[part.names[0]] = None
                continue
            self._check(place, part.value, cast)
            wanted.append((place, part.value.detach()))
        values = {entry.names[0]: entry.value for entry in state if is_opaque(entry)}
        missing |= {
            name: None
            for name, inside in self._parts_of(state, key).items()
            if not inside and not _is_empty_dict(values[name])
        }
        return wanted, list(missing)

    def _place(self, names: Iterable[str], key: str) -> str | None:
        """The first of a model's names that the checkpoint has, as it stands there."""
        return next((under(key, name) for name in names if under(key, name) in self._there), None)

    def _check_wrappers(self, entries: Sequence[StateValue], key: str) -> None:
        """Raise an error where a tensor wraps others in the checkpoint or in the model, and not in both."""
        places = [self._place([f"{name}.{WRAPPER}" for name in entry.names], key) for entry in entries]
        # a tensor of that name is a weight, of a module where there is a tensor here
        texts: dict[str, Any] = {
            place: None
            for place in places
            if place is not None and not isinstance(self._there[place], TensorStorageMetadata)
        }
        self.read(texts)
        for entry, place in zip(entries, places, strict=True):
            there = texts.get(place or "", "an ordinary tensor")
            here = description(entry.value) if is_wrapper(entry.value) else "an ordinary tensor"
            if there != here and (place in texts or self._place(entry.names, key)):
                raise CheckpointError(
                    f"{under(key, entry.names[0])!r} is {there} in {self.path!r}, and {here} here: load it "
                    "into the model as it was saved (quantise before loading what was quantised, and after "
                    "loading what was not)"
                )

    def dtype(self, names: Iterable[str], key: str) -> torch.dtype | None:
        """The dtype that a tensor of a model has in the checkpoint; None where it is not there."""
        place = self._place(names, key)
        saved = None if place is None else self._there[place]
        return saved.properties.dtype if isinstance(saved, TensorStorageMetadata) else None

    def fetch(self, wanted: Sequence[tuple[str, Tensor]]) -> Incoming:
        """Read the values that `find` returned, into new memory: on the CPU, or sharded like the tensor."""
        buffers: dict[str, Any] = {}
        incoming: Incoming = []
        for place, tensor in wanted:
            saved = self._there[place]
            assert isinstance(saved, TensorStorageMetadata)
            dtype, is_sharded = saved.properties.dtype, isinstance(tensor, DTensor)
            buffer = (
                torch.empty_like(tensor, dtype=dtype) if is_sharded else torch.empty(saved.size, dtype=dtype)
            )
            incoming.append((tensor, buffers.setdefault(place, buffer)))
        self.read(buffers)
        return incoming

    def _check(self, place: str, tensor: Tensor, cast: bool) -> None:
        if not has_memory(tensor):
            raise CheckpointError(
                f"{place!r} is on the meta device: materialise the stage before loading into it"
            )
        saved = self._there[place]
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(f"{place!r} of {self.path!r} is no tensor, but the model's is")
        if saved.size != tensor.shape:
            raise CheckpointError(
                f"{place!r} has shape {list(saved.size)} in {self.path!r}, and {list(tensor.shape)} here: "
                "load it into the model that was saved"
            )
        if saved.properties.dtype != tensor.dtype and not cast:
            raise CheckpointError(
                f"{place!r} is {saved.properties.dtype} in {self.path!r}, and {tensor.dtype} here: convert "
                "the stage first, or pass cast=True to convert what is read"
            )

    def message(self, missing: Sequence[str], key: str) -> str:
        """The text of an error about names that are missing."""
        text = f"the checkpoint {self.path!r} does not have {listed(under(key, name) for name in missing)}"
        elsewhere = next((place for place in self._there if place.endswith(missing[0])), None)
        if elsewhere is not None:
            prefix = elsewhere.removesuffix(missing[0]).removesuffix(".")
            return f"{text}, but it has {elsewhere!r}: pass model_key={prefix!r}"
        return f"{text}: load what was saved from this model, or pass strict=False to leave them as they are"

    def opaque(self, state: Sequence[StateValue], key: str) -> dict[str, Any]:
        """The modules' extra state that the checkpoint has, by name."""
        parts = self._parts_of(state, key)
        wanted = {place: self._buffer(place, torch.empty(0)) for inside in parts.values() for place in inside}
        self.read(wanted)
        return {
            name: value_of_parts({path: wanted[place] for place, path in inside.items()})
            for name, inside in parts.items()
            if inside
        }

    def _parts_of(self, state: Sequence[StateValue], key: str) -> dict[str, dict[str, tuple[str | int, ...]]]:
        """By the name of each extra state: what is stored of it, with its way into the value."""
        places = {entry.names[0]: under(key, entry.names[0]) for entry in state if is_opaque(entry)}
        parts = stored_parts(set(places.values()), self._there.keys(), self._paths) if places else {}
        return {name: parts[place] for name, place in places.items()}

    def read(self, wanted: dict[str, Any]) -> None:
        """Read into the tensors of ``wanted``, in place; other values are replaced there."""
        if not wanted:
            return
        planner = PlainPlanner(self.path, allow_pickle=self.allow_pickle)
        try:
            with quiet_alone():
                load(wanted, storage_reader=self._reader, planner=planner, no_dist=True)
        except (Exception, CheckpointException) as error:
            failures = getattr(error, "failures", {}).values()
            for failure in (failure for failure, _ in failures if isinstance(failure, PartitaError)):
                raise failure from error
            raise CheckpointError(
                f"the checkpoint {self.path!r} could not be read: {reason(error)}"
            ) from error

    def values(self, kind: str, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The values of each parameter below ``kind``, by its name and then by theirs (``exp_avg``)."""
        prefix = f"{kind}."
        keys = [name.removeprefix(prefix) for name in self._there if name.startswith(prefix)]
        places = state_places(keys, parameters)
        wanted = {
            prefix + place: self._buffer(prefix + place, parameters[name])
            for name, by_kind in places.items()
            for place in by_kind.values()
        }
        self.read(wanted)
        return {
            name: {what: wanted[prefix + place] for what, place in by_kind.items()}
            for name, by_kind in places.items()
        }

    def _buffer(self, place: str, parameter: Tensor) -> Any:
        """Memory to read into. A value of a parameter's shape is sharded like it and on its device."""
        saved = self._there[place]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        dtype = saved.properties.dtype
        if saved.size and saved.size == parameter.shape:  # a step counter stays on the CPU
            return torch.zeros_like(parameter.detach(), dtype=dtype)
        return torch.empty(saved.size, dtype=dtype)

    def settings(self, key: str, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The settings of each parameter (learning rate and so on), from either layout of param groups."""
        kind, numbers = f"{key}.param_groups", 0
        settings: dict[str, dict[str, Any]] = {}
        while f"{kind}.{numbers}.params" in self._there:
            prefix = f"{kind}.{numbers}."
            wanted = {
                place: self._buffer(place, torch.empty(0))
                for place in self._there
                if place.startswith(prefix)
            }
            self.read(wanted)
            group = {place.removeprefix(prefix): value for place, value in wanted.items()}
            for name in group.pop("params"):
                settings[name] = {what: value for what, value in group.items() if what != "param_names"}
            numbers += 1
        return settings if numbers else self.values(kind, parameters)

    def extra(self) -> dict[str, Any]:
        """The user's own values, by name."""
        wanted: dict[str, Any] = {place: None for place in self._there if place.startswith(f"{EXTRA}.")}
        self.read(wanted)
        return {
            place.removeprefix(f"{EXTRA}."): plain_value(
                BytesIO(value), f"{place!r} of {self.path!r}", allow_pickle=self.allow_pickle
            )
            for place, value in wanted.items()
            if isinstance(value, bytes)
        }


def _is_empty_dict(value: Any) -> bool:
    """Whether there is nothing of it where torch stores a dict item by item."""
    return isinstance(value, Mapping) and not value
