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
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from partita._torch.containers.pytree import flatten_registered, unflatten
from partita._torch.tensors.subclasses import tensor_parts
from partita.errors import CheckpointError
from partita.pipelining.stages.placing.state_of_stage import EXTRA_STATE, StateValue

__all__ = ["WRAPPER", "as_dicts", "as_tensors", "description", "is_description", "is_wrapper", "parts_of"]

WRAPPER = "wrapper"
"""The last part of the name of the text that says what a model's wrapped tensor is."""

_MARK = "partita.wrapper"
"""The key of a class's name in the dict that stands for a wrapped tensor."""

_KEYS = frozenset({_MARK, "context", "size", "stride", "tensors"})


def is_wrapper(value: Any) -> bool:
    """Whether it is a tensor that wraps others, and is not one tensor in shards.

    >>> jagged = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    >>> is_wrapper(jagged), is_wrapper(torch.ones(1))
    (True, False)
    """
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and tensor_parts(value) is not None


def parts_of(entry: StateValue) -> Iterator[StateValue]:
    """A model's value as its parts with memory, each under its names; itself where it wraps nothing.

    Raises:
        CheckpointError: it is in shards, each of which wraps others.
    """
    _check_shards(
        entry.value, repr(entry.names[0]), "shard the model after loading it, and save it unsharded"
    )
    parts = tensor_parts(entry.value) if is_wrapper(entry.value) else None
    if parts is None:
        yield entry
        return
    for attribute, part in parts.tensors.items():
        yield from parts_of(StateValue(part, tuple(f"{name}.{attribute}" for name in entry.names)))


def _check_shards(value: Any, what: str, cure: str) -> None:
    if isinstance(value, DTensor) and is_wrapper(shard := value.to_local()):
        raise CheckpointError(
            f"{what} is in shards, each a {type(shard).__qualname__}, whose parts can't be put into other "
            f"shards: {cure}"
        )


def description(tensor: Tensor) -> str:
    """What a wrapped tensor is, for a comparison with another: class, dtype, shape, how it reads its parts,
    and what these are.
    """
    parts = tensor_parts(tensor)
    assert parts is not None
    # The symbol that stands for a ragged size is another in each process.
    sizes = ", ".join(str(size) if isinstance(size, int) else "ragged" for size in tensor.shape)
    inner = ", ".join(
        f"{name}: {description(part) if is_wrapper(part) else part.dtype}"
        for name, part in parts.tensors.items()
    )
    return f"{_class_name(tensor)} {tensor.dtype} [{sizes}] {_text(parts.context)} ({inner})"


def _text(value: Any) -> str:
    """A value as text that is the same in each process, and another for another value.

    >>> _text({"size": (2, 3), "names": {"b", "a"}})
    "{'size': (2, 3), 'names': {'a', 'b'}}"
    """
    if type(value) is dict:
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if type(value) in (set, frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(_text, value)) + "]"
    if type(value) is tuple:
        return "(" + ", ".join(map(_text, value)) + ("," if len(value) == 1 else "") + ")"
    if repr(value) == object.__repr__(value):
        return f"{type(value).__qualname__}({_text(getattr(value, '__dict__', {}))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def is_description(name: str) -> bool:
    """Whether a name of a model's value in a checkpoint is that of a `description`.

    >>> is_description("layer.weight.wrapper"), is_description("layer._extra_state.wrapper")
    (True, False)
    """
    return name.endswith(f".{WRAPPER}") and EXTRA_STATE not in name.split(".")


def _class_name(tensor: Tensor) -> str:
    return f"{type(tensor).__module__}:{type(tensor).__qualname__}"


def as_dicts(value: Any, what: str) -> Any:
    """A value, or a container's values, with dicts for the tensors that wrap others.

    Args:
        what: what the value is, for the message.

    Raises:
        CheckpointError: a tensor in shards, each of which wraps others, or of a class that is not found.
    """
    leaves, spec = flatten_registered(value, lambda leaf: isinstance(leaf, Tensor))
    return unflatten([_as_dict(leaf, what) for leaf in leaves], spec)


def _as_dict(value: Any, what: str) -> Any:
    _check_shards(
        value, what, "save without this optimizer, or train with one whose state is ordinary tensors"
    )
    parts = tensor_parts(value) if is_wrapper(value) else None
    if parts is None:
        return value
    name = _class_name(value)
    if _class_of(name) is not type(value):
        raise CheckpointError(
            f"{what} is a {name.replace(':', '.')}, and loading would not find the class by this name: "
            "define it at the top of a module, or save without this optimizer"
        )
    return {
        _MARK: name,
        "context": parts.context,
        "size": tuple(value.shape),
        "stride": tuple(value.stride()),
        "tensors": {name: _as_dict(part, what) for name, part in parts.tensors.items()},
    }


def _class_of(name: str) -> Any:
    """The object of a class's name, of a module that is imported; None where there is none. It is only looked
    up: a module that imports what it is asked for is not asked.
    """
    module, _, path = name.partition(":")
    owner: Any = sys.modules.get(module)
    for key in path.split("."):
        owner = getattr(owner, "__dict__", {}).get(key)
    return owner


def as_tensors(value: Any, what: str) -> Any:
    """The value that `as_dicts` had, on the CPU. Nothing is imported for it.

    Raises:
        CheckpointError: a class that this process has not imported, parts that it does not take, or a
            parameter in shards.
    """
    leaves, spec = flatten_registered(value, _is_dict)
    return unflatten([_as_tensor(leaf, what) if _is_dict(leaf) else leaf for leaf in leaves], spec)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == _KEYS


def _as_tensor(value: dict[str, Any], what: str) -> Tensor:
    name, parts = value[_MARK], value["tensors"]
    kind = _class_of(name) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise CheckpointError(
            f"{what} is a {str(name).replace(':', '.')}, which this process has not imported: make the "
            "optimizer of the class that was saved, which imports it, before loading"
        )
    tensors = {}
    for key, part in parts.items() if isinstance(parts, dict) else ():
        if isinstance(part, DTensor):
            raise CheckpointError(
                f"{what} is a {kind.__qualname__}, whose parts can't be put into shards, but its parameter "
                "is in shards here: load it before the parameter is sharded, or without this optimizer"
            )
        tensor = as_tensors(part, what)
        tensors[key] = tensor.cpu() if isinstance(tensor, Tensor) else tensor
    try:
        size = torch.Size(value["size"])
        whole = kind.__tensor_unflatten__(tensors, value["context"], size, value["stride"])
    except Exception as error:  # the class's own code
        raise CheckpointError(_other_parts(what, kind, f"{type(error).__name__}: {error}")) from error
    if type(whole) is not kind or whole.shape != size:
        how = f"a {type(whole).__qualname__} of shape {list(getattr(whole, 'shape', ()))}, not {list(size)}"
        raise CheckpointError(_other_parts(what, kind, how))
    return whole


def _other_parts(what: str, kind: type, how: str) -> str:
    return (
        f"{what} can't be made a {kind.__qualname__} of what was saved ({how[:200]}): load with the version "
        "of its library that it was saved with, or take another checkpoint"
    )
