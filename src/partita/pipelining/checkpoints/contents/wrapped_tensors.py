"""Tensors whose class wraps others (a quantised weight, the 8-bit state of an optimizer), as the tensors that
they are made of. A copy into an ordinary tensor would undo what the class is for.

A model's, whose class is there when a checkpoint is read, are written under the names of their parts, with a
text beside them that says what they are::

    layer.weight.codes    layer.weight.scale    layer.weight.wrapper

An optimizer's, which may be made by its first step only, become dicts that say how to make them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partita._torch.containers.pytree import flatten_registered, unflatten
from partita._torch.tensors.subclasses import tensor_parts
from partita.errors import CheckpointError
from partita.pipelining.stages.placing.state_of_stage import StateValue

__all__ = ["WRAPPER", "as_dicts", "as_tensors", "description", "is_description", "is_wrapper", "parts_of"]

WRAPPER = "wrapper"
"""The last part of the name of the text that says what a model's wrapped tensor is."""

_MARK = "partita.wrapper"
"""The key of a class's name in the dict that stands for a wrapped tensor."""


def is_wrapper(value: Any) -> bool:
    """Whether it is a tensor that wraps others, and is not one tensor in shards.

    >>> jagged = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    >>> is_wrapper(jagged), is_wrapper(torch.ones(1))
    (True, False)
    """
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and tensor_parts(value) is not None


def parts_of(entry: StateValue) -> Iterator[StateValue]:
    """A model's value as its parts with memory, each under its names; itself where it wraps nothing."""
    parts = tensor_parts(entry.value) if is_wrapper(entry.value) else None
    if parts is None:
        yield entry
        return
    for attribute, part in parts.tensors.items():
        yield from parts_of(StateValue(part, tuple(f"{name}.{attribute}" for name in entry.names)))


def description(tensor: Tensor) -> str:
    """What a wrapped tensor is, for a comparison with another: class, dtype, shape, and how it reads its
    parts.
    """
    parts = tensor_parts(tensor)
    assert parts is not None
    how = re.sub(r" at 0x[0-9a-f]+", "", repr(parts.context))
    inner = [f"{name}: {description(part)}" for name, part in parts.tensors.items() if is_wrapper(part)]
    return " ".join([f"{_class_name(tensor)} {tensor.dtype} {list(tensor.shape)} {how}", *inner])


def is_description(name: str) -> bool:
    """Whether a name of a model's value in a checkpoint is that of a `description`.

    >>> is_description("layer.weight.wrapper"), is_description("layer._extra_state.wrapper")
    (True, False)
    """
    return name.endswith(f".{WRAPPER}") and "_extra_state" not in name.split(".")


def _class_name(tensor: Tensor) -> str:
    return f"{type(tensor).__module__}:{type(tensor).__qualname__}"


def as_dicts(value: Any, what: str) -> Any:
    """A value, or a container's values, with dicts for the tensors that wrap others.

    Args:
        what: what the value is, for the message.

    Raises:
        CheckpointError: a tensor in shards, each of which wraps others.
    """
    leaves, spec = flatten_registered(value, lambda leaf: isinstance(leaf, Tensor))
    return unflatten([_as_dict(leaf, what) for leaf in leaves], spec)


def _as_dict(value: Any, what: str) -> Any:
    if isinstance(value, DTensor) and is_wrapper(shard := value.to_local()):
        raise CheckpointError(
            f"{what} is in shards, each a {type(shard).__qualname__}, whose parts can't be put into other "
            "shards: save without this optimizer, or train with one whose state is ordinary tensors"
        )
    parts = tensor_parts(value) if is_wrapper(value) else None
    if parts is None:
        return value
    return {
        _MARK: _class_name(value),
        "context": parts.context,
        "size": tuple(value.shape),
        "stride": tuple(value.stride()),
        "tensors": {name: _as_dict(part, what) for name, part in parts.tensors.items()},
    }


def as_tensors(value: Any, what: str) -> Any:
    """The value that `as_dicts` had, on the CPU. Nothing is imported for it.

    Raises:
        CheckpointError: a class that this process has not imported, or a parameter in shards.
    """
    leaves, spec = flatten_registered(value, _is_dict)
    return unflatten([_as_tensor(leaf, what) if _is_dict(leaf) else leaf for leaf in leaves], spec)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and _MARK in value


def _as_tensor(value: dict[str, Any], what: str) -> Tensor:
    module, _, name = value[_MARK].partition(":")
    kind = reduce(lambda owner, key: getattr(owner, key, None), name.split("."), sys.modules.get(module))
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise CheckpointError(
            f"{what} is a {module}.{name}, which this process has not imported: make the optimizer of the "
            "class that was saved, which imports it, before loading"
        )
    tensors = {}
    for key, part in value["tensors"].items():
        if isinstance(part, DTensor):
            raise CheckpointError(
                f"{what} is a {name}, whose parts can't be put into shards, but its parameter is in shards "
                "here: load it before the parameter is sharded, or without this optimizer"
            )
        tensors[key] = as_tensors(part, what).cpu()
    return kind.__tensor_unflatten__(tensors, value["context"], torch.Size(value["size"]), value["stride"])
