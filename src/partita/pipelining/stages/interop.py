"""Our stages under the schedules of ``torch.distributed.pipelining``.

There, a stage takes what the one before it returns, and nothing else. So values that skip stages are passed
through those between::

    here    0 --h--> 1 --k--> 2        there   0 --h--> 1 --k, h--> 2
            0 -------h------> 2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage

from partita._torch.fake.call import fake_call
from partita.capture.open_sizes.sizes import evaluated
from partita.errors import ArgumentError
from partita.pipelining.interface.routes import Named, Routes
from partita.pipelining.interface.values import Constant, Value, accept
from partita.pipelining.stages.graph_stage import GraphStage, named_outputs
from partita.pipelining.stages.own_modules.manual import PipelineStage
from partita.pipelining.stages.placing.state_of_stage import stage_modules
from partita.pipelining.stages.stage import Stage

__all__ = ["to_torch_stage"]


def to_torch_stage(
    stage: Stage,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    mb_args: tuple[Any, ...] | None = None,
    mb_kwargs: Mapping[str, Any] | None = None,
) -> TorchStage:
    """Return a stage for torch's own schedules (``ScheduleGPipe``, ``Schedule1F1B`` and others). It has the
    same parameters under the same names, and the same inputs and outputs as ``stage``; the placement of
    stages and the handling of losses and gradients are torch's.

    Args:
        stage: from ``Pipe.build_stage``, or a `PipelineStage` of the user's own module.
        device: where it runs; by default where it is.
        group: the process group of the pipeline's ranks; that of ``stage`` if not given.
        mb_args: arguments of a microbatch, if the pipe was cut for any batch size: torch's sizes are fixed.
        mb_kwargs: the keyword arguments of that microbatch.

    Raises:
        ArgumentError: a tied parameter, whose gradients torch's schedules do not sum; sizes that are open; a
            model that returns something else than tensors, or that was cut with ``frontend="modules"``; a
            stage that is recomputed as a whole.
    """
    device = torch.device(device) if device is not None else stage.device
    group = group if group is not None else stage.group
    if stage.recompute:
        raise ArgumentError(
            f"stage {stage.index} is to be recomputed, which torch's schedules don't do: leave it out of "
            "recompute, or run it with a schedule of partita.pipelining"
        )
    if isinstance(stage, PipelineStage):
        return TorchStage(stage.module, stage.index, stage.num_stages, device, group=group)
    if not isinstance(stage, GraphStage):
        raise ArgumentError(
            'a stage that was cut with frontend="modules" hands on more than tensors, and torch\'s schedules '
            "take nothing else: run it with a schedule of partita.pipelining"
        )
    routes = _plain_routes(stage, mb_args, mb_kwargs)
    chain = _Chain(stage, routes)
    return TorchStage(
        chain,
        stage.index,
        stage.num_stages,
        device,
        input_args=tuple(_on(device, value) for value in chain.takes),
        output_args=_results(stage, routes, {value.name: _on(device, value) for value in chain.takes})
        if stage.is_last
        else tuple(_on(device, value) for value in chain.gives),
        group=group,
    )


def _plain_routes(
    stage: GraphStage, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
) -> Routes:
    routes = stage.routes
    if routes.tied:
        raise ArgumentError(
            f"the parameter {routes.tied[0].names[0]!r} is in stages {list(routes.tied[0].stages)}, and "
            "torch's schedules do not add its gradients up: cut with "
            "multi_use_param_spec=MultiUseParameterConfig.TRANSMIT"
        )
    if not routes.symbols:
        return routes
    if args is None:
        raise ArgumentError(
            "the pipe was cut for any batch size, and torch's schedules need one: pass the arguments of a "
            "microbatch as mb_args"
        )
    return routes.at(routes.sizes_of(stage.signature.flatten(args, kwargs or {})), stage.module.training)


def _on(device: torch.device, value: Value) -> Tensor:
    shape = evaluated(value.shape, {})
    return torch.empty(shape, dtype=value.dtype, device=device, requires_grad=value.requires_grad)


def _results(stage: GraphStage, routes: Routes, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What the last stage returns for such values, in the layout that torch compares results with."""
    output = (routes.signature or stage.signature).unflatten(routes.results)
    items = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    if not all(isinstance(item, Named) for item in items):
        raise ArgumentError(
            f"the model returns a {type(output).__name__} that is no tensor or tuple of tensors, and torch's "
            "schedules take nothing else: let the model return tensors, or use a schedule of "
            "partita.pipelining"
        )
    by_name = {**values, **routes.numbers}
    (module,) = stage_modules(stage)
    with torch.no_grad():
        result = fake_call(module, [by_name[name] for name in stage.border.inputs])
    by_name |= named_outputs(stage.border, result)
    results = [by_name[item.name] for item in items]
    return tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        for value in results
    )


class _Chain(nn.Module):
    """A stage as torch calls it. Shares the children, parameters and buffers of the stage's module.

    Attributes:
        takes: what it is given: the model's tensors on the first stage.
        gives: what it returns, in a tuple; nothing on the last stage.
    """

    def __init__(self, stage: GraphStage, routes: Routes) -> None:
        super().__init__()
        module = stage.module
        object.__setattr__(self, "_stage", stage)  # not a child: names stay those of the model
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        kept = module.state_dict()
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in kept)
        self.training = module.training
        self._routes = routes
        self._is_first, self._is_last = stage.is_first, stage.is_last
        inputs = {value.name: value for value in routes.inputs if isinstance(value, Value)}
        by_name = {**inputs, **routes.values}
        self._before = _crossing(routes, stage.index - 1)
        self._after = _crossing(routes, stage.index)
        self.takes = (
            tuple(inputs.values()) if self._is_first else tuple(by_name[name] for name in self._before)
        )
        self.gives = tuple(by_name[name] for name in self._after)

    def train(self, mode: bool = True) -> _Chain:
        """As on any module; the flag of the stage's own module goes along."""
        super().train(mode)
        self._own.module.train(mode)
        return self

    @property
    def _own(self) -> GraphStage:
        stage: GraphStage = vars(self)["_stage"]
        return stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch; values keep their autograd history, which torch's schedules go back through."""
        stage, routes = self._own, self._routes
        values = self._inputs(args, kwargs)
        by_name = {**values, **routes.numbers}
        by_name |= {name: values[name].clone() for name in stage.border.written if name in values}
        result = stage.module(*(by_name[name] for name in stage.border.inputs))
        values.update(named_outputs(stage.border, result))
        values.update({name: values[name].clone() for name in stage.border.reused})
        if self._is_last:
            return stage.results(values, routes)
        return tuple(values[name] for name in self._after)

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        if not self._is_first:
            return dict(zip(self._before, args, strict=True))
        signature = self._routes.signature or self._own.signature
        flat = signature.flatten(args, kwargs)
        accept(self._routes.inputs, flat, "a microbatch", signature)
        return {
            wanted.name: value
            for wanted, value in zip(self._routes.inputs, flat, strict=True)
            if not isinstance(wanted, Constant)
        }


def _crossing(routes: Routes, stage: int) -> tuple[str, ...]:
    """The names of what is made in ``stage`` or before and needed after it, in the order of making."""
    names = [
        (producer, place, name)
        for (producer, consumer), crossing in routes.forward.items()
        if producer <= stage < consumer
        for place, name in enumerate(crossing)
    ]
    return tuple(dict.fromkeys(name for _, _, name in sorted(names)))
