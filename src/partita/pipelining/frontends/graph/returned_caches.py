"""A warning for caches that a cut model sends from stage to stage for nothing but to return them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import nn

from partita._torch.containers.pytree import flatten
from partita.errors import CostlyCut
from partita.pipelining.frontends.graph.pipe import GraphPipe
from partita.pipelining.interface.routes import Named, Routes

__all__ = ["warn_of_caches"]


def warn_of_caches(model: nn.Module, pipe: GraphPipe, flat: Sequence[Any]) -> None:
    """Warn where stages send on keys and values of attention, or other caches, which only ``generate`` uses.

    Which outputs these are, transformers' configurations say (``keys_to_ignore_at_inference``).

    Args:
        flat: the flat example, for the sizes.

    Warns:
        CostlyCut: names the outputs, their bytes, and the option that leaves them out.
    """
    output = pipe.signature.unflatten(pipe.routes.results)
    if not isinstance(output, Mapping):
        return
    names = {key: _names(output[key]) for key in _cache_keys(model) if key in output}
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


def _cache_keys(model: nn.Module) -> Iterator[str]:
    """The names of outputs that hold caches."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        yield from getattr(config, "keys_to_ignore_at_inference", None) or ()


def _names(tree: Any) -> list[str]:
    return [leaf.name for leaf in flatten(tree)[0] if isinstance(leaf, Named)]


def _bytes(routes: Routes, names: Collection[str]) -> int:
    """The bytes of these values, wherever they are sent."""
    return sum(
        prod(routes.values[name].shape) * routes.values[name].dtype.itemsize
        for sent in routes.forward.values()
        for name in sent
        if name in names
    )
