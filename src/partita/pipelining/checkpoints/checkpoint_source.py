"""A checkpoint as it is read: what it has, and where that belongs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from partita._torch.tensors import has_memory
from partita.errors import CheckpointError
from partita.pipelining.checkpoints.optimizer_state import state_places
from partita.pipelining.checkpoints.replicas import under
from partita.pipelining.listing import listed
from partita.pipelining.stages.held_state import Held, is_opaque

__all__ = ["EXTRA", "CheckpointSource", "quiet_alone", "reason"]

EXTRA = "partita_extra"
"""The section of what the user keeps beside."""


@contextmanager
def quiet_alone() -> Iterator[None]:
    """torch warns whenever one process saves or loads alone, also where it was told to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in a single process.*", category=UserWarning)
        yield


def reason(error: BaseException) -> str:
    """What went wrong, and on which rank where torch tells; its own text is pages of tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in error.failures.items())
    return repr(error)


class CheckpointSource:
    """A checkpoint that is being read.

    Args:
        path: its directory.

    Raises:
        CheckpointError: the directory can't be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._reader = FileSystemReader(path)
        try:
            self._there = self._reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise CheckpointError(f"{path!r} holds no checkpoint that can be read: {error!r}") from error

    def find(
        self, state: Sequence[Held], key: str, *, cast: bool
    ) -> tuple[list[dict[str, Tensor]], list[str]]:
        """Where the tensors of a model are, all checked.

        Returns:
            What `read` takes: from the checkpoint's name to the tensor to read into (a name twice, where two
            stages of this process have a copy each, makes a second dict). And the names that are not there.
        """
        rounds: list[dict[str, Tensor]] = [{}]
        missing: dict[str, None] = {}
        for held in state:
            if is_opaque(held):
                continue
            place = next((under(key, name) for name in held.names if under(key, name) in self._there), None)
            if place is None:
                missing[held.names[0]] = None
                continue
            self._check(place, held.value, cast)
            free = next((wanted for wanted in rounds if place not in wanted), None)
            if free is None:
                rounds.append(free := {})
            free[place] = held.value.detach()
        return rounds, list(missing)

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

    def opaque(self, state: Sequence[Held], key: str) -> dict[str, Any]:
        """What the checkpoint has of modules' extra state, by name."""
        places = {held.names[0]: under(key, held.names[0]) for held in state if is_opaque(held)}
        there = {name: place for name, place in places.items() if place in self._there}
        wanted = {place: self._room(place, torch.empty(0)) for place in there.values()}
        self.read(wanted)
        return {name: wanted[place] for name, place in there.items()}

    def read(self, wanted: dict[str, Any]) -> None:
        """Read into the values of ``wanted``, in place; what is no tensor is replaced there."""
        if not wanted:
            return
        try:
            with quiet_alone():
                load(wanted, storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"the checkpoint {self.path!r} could not be read: {reason(error)}"
            ) from error

    def values(self, kind: str, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """What there is about each parameter below ``kind``, by its name and then by what it is."""
        prefix = f"{kind}."
        keys = [name.removeprefix(prefix) for name in self._there if name.startswith(prefix)]
        places = state_places(keys, parameters)
        wanted = {
            prefix + place: self._room(prefix + place, parameters[name])
            for name, found in places.items()
            for place in found.values()
        }
        self.read(wanted)
        return {
            name: {what: wanted[prefix + place] for what, place in found.items()}
            for name, found in places.items()
        }

    def _room(self, place: str, parameter: Tensor) -> Any:
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
                place: self._room(place, torch.empty(0)) for place in self._there if place.startswith(prefix)
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
            place.removeprefix(f"{EXTRA}."): torch.load(BytesIO(value), weights_only=True)
            for place, value in wanted.items()
            if isinstance(value, bytes)
        }
