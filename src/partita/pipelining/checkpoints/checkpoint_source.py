"""A checkpoint as it is read: what it has, and where that belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from partita._torch.tensors.storage import has_memory
from partita.errors import CheckpointError, PartitaError
from partita.listing import listed
from partita.pipelining.checkpoints.checked_reader import CheckedReader, PlainPlanner
from partita.pipelining.checkpoints.optimizer_state import state_places
from partita.pipelining.checkpoints.plain_values import plain_value
from partita.pipelining.checkpoints.reasons import quiet_alone, reason
from partita.pipelining.checkpoints.replicas import under
from partita.pipelining.stages.state_of_stage import StateValue, is_opaque

__all__ = ["EXTRA", "CheckpointSource", "Incoming"]

Incoming = list[tuple[Tensor, Tensor]]
"""Tensors of a model, each with the values that it is to get."""

EXTRA = "partita_extra"
"""The section of what the user keeps beside."""


class CheckpointSource:
    """A checkpoint that is being read.

    Args:
        path: its directory.
        trust: unpickle what is no plain data.

    Attributes:
        identity: tells the checkpoint from any other.
        steps: how many steps the schedule had made; None where it does not say.

    Raises:
        CheckpointError: the directory can't be read.
    """

    def __init__(self, path: str, *, trust: bool = False) -> None:
        self.path = path
        self._trust = trust
        self._reader = CheckedReader(path, trust=trust)
        self._there = self._reader.read_metadata().state_dict_metadata
        self.identity = self._reader.identity
        manifest = self._reader.manifest
        self.steps = None if manifest is None else manifest.steps

    def find(
        self, state: Sequence[StateValue], key: str, *, cast: bool
    ) -> tuple[list[tuple[str, Tensor]], list[str]]:
        """Where the tensors of a model are, all checked.

        Returns:
            What `fetch` takes: the checkpoint's names, each with the tensor that it is for (two stages of
            this process may have a copy each). And the names that are not there.
        """
        wanted: list[tuple[str, Tensor]] = []
        missing: dict[str, None] = {}
        for held in state:
            if is_opaque(held):
                continue
            place = next((under(key, name) for name in held.names if under(key, name) in self._there), None)
            if place is None:
                missing[held.names[0]] = None
                continue
            self._check(place, held.value, cast)
            wanted.append((place, held.value.detach()))
        return wanted, list(missing)

    def fetch(self, wanted: Sequence[tuple[str, Tensor]]) -> Incoming:
        """Read what `find` found into memory of its own: on the CPU, and sharded like the tensor where that
        is.
        """
        rooms: dict[str, Any] = {}
        incoming: Incoming = []
        for place, tensor in wanted:
            room = self._waiting(place, tensor)
            incoming.append((tensor, rooms.setdefault(place, room)))
        self.read(rooms)
        return incoming

    def _waiting(self, place: str, tensor: Tensor) -> Tensor:
        saved = self._there[place]
        assert isinstance(saved, TensorStorageMetadata)
        if isinstance(tensor, DTensor):
            return torch.empty_like(tensor, dtype=saved.properties.dtype)
        return torch.empty(saved.size, dtype=saved.properties.dtype)

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
        """What is said about names that are not there."""
        text = f"the checkpoint {self.path!r} does not have {listed(under(key, name) for name in missing)}"
        found = next((place for place in self._there if place.endswith(missing[0])), None)
        if found is not None:
            prefix = found.removesuffix(missing[0]).removesuffix(".")
            return f"{text}, but it has {found!r}: pass model_key={prefix!r}"
        return f"{text}: load what was saved from this model, or pass strict=False to leave them as they are"

    def opaque(self, state: Sequence[StateValue], key: str) -> dict[str, Any]:
        """What the checkpoint has of modules' extra state, by name."""
        places = {held.names[0]: under(key, held.names[0]) for held in state if is_opaque(held)}
        there = {name: place for name, place in places.items() if place in self._there}
        wanted = {place: self._buffer(place, torch.empty(0)) for place in there.values()}
        self.read(wanted)
        return {name: wanted[place] for name, place in there.items()}

    def read(self, wanted: dict[str, Any]) -> None:
        """Read into the values of ``wanted``, in place; what is no tensor is replaced there."""
        if not wanted:
            return
        planner = PlainPlanner(self.path, trust=self._trust)
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
        """What there is about each parameter below ``kind``, by its name and then by what it is."""
        prefix = f"{kind}."
        keys = [name.removeprefix(prefix) for name in self._there if name.startswith(prefix)]
        places = state_places(keys, parameters)
        wanted = {
            prefix + place: self._buffer(prefix + place, parameters[name])
            for name, found in places.items()
            for place in found.values()
        }
        self.read(wanted)
        return {
            name: {what: wanted[prefix + place] for what, place in found.items()}
            for name, found in places.items()
        }

    def _buffer(self, place: str, parameter: Tensor) -> Any:
        """What to read into. What has a parameter's shape is sharded like it and lies where it does."""
        saved = self._there[place]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        dtype = saved.properties.dtype
        if saved.size and saved.size == parameter.shape:  # a step counter stays on the CPU
            return torch.zeros_like(parameter.detach(), dtype=dtype)
        return torch.empty(saved.size, dtype=dtype)

    def settings(self, key: str, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """The learning rate and so on, by parameter, from either layout."""
        kind, numbers = f"{key}.param_groups", 0
        found: dict[str, dict[str, Any]] = {}
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
                found[name] = {what: value for what, value in group.items() if what != "param_names"}
            numbers += 1
        return found if numbers else self.values(kind, parameters)

    def extra(self) -> dict[str, Any]:
        """What was saved beside."""
        wanted: dict[str, Any] = {place: None for place in self._there if place.startswith(f"{EXTRA}.")}
        self.read(wanted)
        return {
            place.removeprefix(f"{EXTRA}."): plain_value(
                BytesIO(value), f"{place!r} of {self.path!r}", trust=self._trust
            )
            for place, value in wanted.items()
            if isinstance(value, bytes)
        }
