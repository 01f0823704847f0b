"""Autocast around a pipeline: the dtypes that cross are worked out anew, once for each kind of autocast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from partita._torch.fake.call import fake_call
from partita.pipelining.interface.routes import Routes, Value
from partita.pipelining.stages.stage import Stage
from partita.pipelining.stages.state_of_stage import stage_modules
from partita.runtime import Comm

__all__ = ["Autocast", "Precision", "current_autocast", "fresh_casts", "with_dtypes", "work_out_dtypes"]


@dataclass(frozen=True, slots=True)
class Autocast:
    """A kind of autocast: for which type of device, to which dtype."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast({self.device!r}, {self.dtype})"


def current_autocast(device: str) -> Autocast | None:
    """The one that holds here for that type of device.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     print(current_autocast("cpu"))
    autocast('cpu', torch.bfloat16)
    """
    if not torch.is_autocast_enabled(device):
        return None
    return Autocast(device, torch.get_autocast_dtype(device))


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Within this block autocast keeps the weights that it has converted, but none from before, and none
    after.

    Left alone it keeps them until the user leaves autocast, and goes on to use them as they were where the
    optimizer has changed them since.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def with_dtypes(routes: Routes, dtypes: Mapping[str, torch.dtype]) -> Routes:
    """The same routes for values of other dtypes, by name."""
    values = {
        name: replace(value, dtype=dtypes.get(name, value.dtype)) for name, value in routes.values.items()
    }
    return replace(routes, values=values, _made={})


class Precision:
    """What crosses under each kind of autocast that a pipeline has met so far."""

    def __init__(self) -> None:
        self._known: dict[tuple[Autocast, bool], Routes] = {}

    def routes(
        self, comm: Comm, stages: Mapping[int, Stage], routes: Routes, sizes: Sequence[int] = ()
    ) -> Routes:
        """The same routes for the autocast that holds here. Collective where that is a new one.

        Args:
            routes: as the pipeline was cut.
            sizes: the open ones of any microbatch.
        """
        first = next(iter(stages.values()))
        autocast, training = current_autocast(first.device.type), first.module.training
        if autocast is None or routes.bundled:
            return routes
        if (autocast, training) not in self._known:
            dtypes = work_out_dtypes(comm, stages, routes.at(sizes, training))
            self._known[autocast, training] = with_dtypes(routes, dtypes)
        return self._known[autocast, training]


def work_out_dtypes(comm: Comm, stages: Mapping[int, Stage], routes: Routes) -> dict[str, torch.dtype]:
    """The dtypes of what stages make under the autocast that holds here. Collective: each stage in turn is
    told what comes in, and says what goes out; nothing is computed.

    Args:
        stages: those of this rank, by index.
        routes: with plain sizes.
    """
    known: dict[str, torch.dtype] = {}
    for index in range(routes.stages):
        mine = _made(stages[index], routes, known) if index in stages else {}
        for said in comm.all_gather_object(mine):
            known.update(said)
    return known


def _made(stage: Stage, routes: Routes, known: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Of one stage's outputs."""
    (module,) = stage_modules(stage)
    inputs = {value.name: value for value in routes.inputs}
    args: list[Any] = []
    for name in stage.border.inputs:
        value = inputs.get(name, routes.values.get(name))
        if isinstance(value, Value):
            shape = cast("tuple[int, ...]", value.shape)  # routes with plain sizes
            args.append(torch.empty(shape, dtype=known.get(name, value.dtype), device=stage.device))
        else:
            args.append(routes.numbers[name])
    with torch.no_grad():
        result = fake_call(module, args)
    names = stage.border.outputs
    outputs = dict(zip(names, (result,) if len(names) == 1 else result, strict=True))
    return {name: value.dtype for name, value in outputs.items() if isinstance(value, Tensor)}
