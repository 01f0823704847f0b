"""A warning for caches that a cut model sends from stage to stage for nothing but to return them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, cast

import torch
from torch import nn

from partita._torch.containers.pytree import flatten
from partita.capture.open_sizes.sizes import without_sizes
from partita.errors import CostlyCut
from partita.pipelining.frontends.graph.pipe import GraphPipe
from partita.pipelining.interface.routes import Named, Routes

__all__ = ["warn_of_caches"]

_CACHE_OUTPUTS = ("cache", "past_key_values")  # transformers' names, since 5.24 and before


def warn_of_caches(model: nn.Module, pipe: GraphPipe, flat: Sequence[Any]) -> None:
    """Warn where stages send on keys and values of attention, or other caches, which only ``generate`` uses.

    Which outputs these are, their names say, and transformers' configurations
    (``keys_to_ignore_at_inference``).

    Args:
        flat: the flat example, for the sizes.

    Warns:
        CostlyCut: names the outputs, their bytes, and the option that leaves them out.
    """
    keys_of_caches = _cache_keys(model)
    names = _names_by_key(pipe, keys_of_caches) if keys_of_caches else {}
    sent = pipe.routes.only_returned & {name for key in names for name in names[key]}
    if not sent:
        return
    routes = pipe.routes.at(pipe.routes.sizes_of(flat))
    keys = " and ".join(key for key in names if sent.intersection(names[key]))
    warnings.warn(
        f"{type(model).__name__} returns {keys}, which stages send on to the last one only to be returned: "
        f"{_bytes(routes, sent):,} of {_bytes(routes, routes.values):,} bytes of a microbatch. Only "
        "generate() uses them: set model.config.use_cache = False before the cut",
        CostlyCut,
        stacklevel=3,
    )


def _cache_keys(model: nn.Module) -> set[str]:
    """The names of outputs that hold caches."""
    config = getattr(model, "config", None)
    if not getattr(config, "use_cache", False):
        return set()
    return {*_CACHE_OUTPUTS, *(getattr(config, "keys_to_ignore_at_inference", None) or ())}


def _names_by_key(pipe: GraphPipe, keys: Collection[str]) -> dict[str, list[str]]:
    """The names of the values that the model returns under each of these keys, as far as it does."""
    results = pipe.routes.results
    # containers of the library's own are opened where they hold tensors
    tensors = [torch.empty(0) if isinstance(item, Named) else item for item in results]
    names = {
        id(one): item.name for one, item in zip(tensors, results, strict=True) if isinstance(item, Named)
    }
    output = pipe.signature.unflatten(without_sizes(tensors))
    if not isinstance(output, Mapping):
        return {}
    return {
        key: [names[id(leaf)] for leaf in flatten(output[key])[0] if id(leaf) in names]
        for key in output  # a renamed output still answers to its former name, with a warning
        if key in keys
    }


def _bytes(routes: Routes, names: Collection[str]) -> int:
    """The bytes of these values, wherever they are sent."""
    return sum(
        prod(cast("tuple[int, ...]", routes.values[name].shape)) * routes.values[name].dtype.itemsize
        for sent in routes.forward.values()
        for name in sent
        if name in names
    )
