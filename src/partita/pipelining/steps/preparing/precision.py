"""Autocast around a pipeline: the dtypes that cross borders, inferred once for each kind of autocast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from partita._torch.fake.call import fake_call
from partita.capture.proving.autocasts import Autocast, current_autocast
from partita.pipelining.interface.routes import Routes
from partita.pipelining.interface.values import Value
from partita.pipelining.stages.graph_stage import named_outputs
from partita.pipelining.stages.placing.state_of_stage import stage_modules
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm

__all__ = ["Precision", "fresh_casts", "with_dtypes", "work_out_dtypes"]


@contextmanager
def fresh_casts() -> Iterator[None]:
    """Clear autocast's cache of converted weights before and after this block.

    Otherwise it is kept until the user leaves autocast, and has weights from before the optimizer's step.
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
    return replace(routes, values=values, _by_sizes={})


class Precision:
    """The routes of a pipeline under each kind of autocast that has been active in a step so far."""

    def __init__(self) -> None:
        self._by_autocast: dict[tuple[Autocast, bool], Routes] = {}

    def routes(
        self, comm: Comm, stages: Mapping[int, Stage], routes: Routes, sizes: Sequence[int] = ()
    ) -> Routes:
        """The routes under the active autocast. Collective the first time that there is one of its kind.

        Args:
            routes: those that the pipeline was cut with.
            sizes: the open sizes of any microbatch.
        """
        first = next(iter(stages.values()))
        autocast, training = current_autocast(first.device.type), first.module.training
        if autocast is None or routes.bundled:
            return routes
        if (autocast, training) not in self._by_autocast:
            dtypes = work_out_dtypes(comm, stages, routes.at(sizes, training))
            self._by_autocast[autocast, training] = with_dtypes(routes, dtypes)
        return self._by_autocast[autocast, training]


def work_out_dtypes(comm: Comm, stages: Mapping[int, Stage], routes: Routes) -> dict[str, torch.dtype]:
    """The dtypes of what stages return under the active autocast, inferred from stage to stage without data.
    Collective.

    Args:
        stages: those of this rank, by index.
        routes: with numbers for all sizes.
    """
    dtypes: dict[str, torch.dtype] = {}
    for index in range(routes.stages):
        mine = _output_dtypes(stages[index], routes, dtypes) if index in stages else {}
        for theirs in comm.all_gather_object(mine):
            dtypes.update(theirs)
    return dtypes


def _output_dtypes(stage: Stage, routes: Routes, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
    (module,) = stage_modules(stage)
    inputs = {value.name: value for value in routes.inputs}
    args: list[Any] = []
    for name in stage.border.inputs:
        value = inputs.get(name, routes.values.get(name))
        if isinstance(value, Value):
            shape = cast("tuple[int, ...]", value.shape)  # all sizes are numbers
            args.append(torch.empty(shape, dtype=dtypes.get(name, value.dtype), device=stage.device))
        else:
            args.append(routes.numbers[name])
    with torch.no_grad():
        outputs = named_outputs(stage.border, fake_call(module, args))
    return {name: value.dtype for name, value in outputs.items() if isinstance(value, Tensor)}
