"""Stages around modules of the user's own: each rank brings its own, and nothing is captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module

from partita._torch.containers.pytree import flatten
from partita._torch.tensors.storage import storage_of
from partita.errors import ArgumentError
from partita.pipelining.interface.layout import copied
from partita.pipelining.interface.routes import TRAILER, Routes, StageBorder, Tied
from partita.pipelining.stages.own_modules.crossing import (
    Crossing,
    arguments_of,
    inferred,
    output_name,
    refuse_distributed,
)
from partita.pipelining.stages.own_modules.declared_outputs import Declared, declared_outputs
from partita.pipelining.stages.own_modules.input_key import input_key
from partita.pipelining.stages.placing.materialise import tensor_slots
from partita.pipelining.stages.placing.state_of_stage import stage_modules
from partita.pipelining.stages.value_stage import ValueStage
from partita.runtime import Comm
from partita.runtime.comms.group_or_comm import check_group_or_comm

__all__ = ["MOST_VALUES", "PipelineStage", "draft_routes", "tag_of"]

Bind = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]

MOST_VALUES = 512
"""How many tensors may cross one border, so that tags can be numbered without asking the other side."""

_KEPT = 256
"""For how many kinds of inputs a stage remembers what it returns."""


class PipelineStage(ValueStage):
    """A stage around a module of the user's own, in a chain: what one returns, the next one takes.

    A tuple or list becomes several positional arguments, anything else (a tensor, a dict, None) a single
    one. Tensors are dense, of any dtype and strides; whatever else is returned (numbers, strings, None) is
    sent ahead of the data, and so must not depend on it. Positional arguments of ``step()`` go to the first
    stage; keyword arguments go to all stages of the rank that is given them. The last stage's result is the
    pipeline's.

    Shapes are inferred in a step, by running a copy of the module on tensors without memory: no data is
    touched, and no statistics or random numbers change. They are sent from stage to stage, and remembered
    for later steps and evaluations with the same shapes.

    Random numbers follow (seed, step, microbatch, stage): every stage's forward draws from a stream of its
    own, whatever the schedule.

    Args:
        submodule: the module, on ``device``. It stays the user's own object.
        stage_index: which stage it is, from 0.
        num_stages: how many there are.
        device: where it runs.
        input_args: for ``output_args``: the inputs that the example belongs to.
        output_args: what the stage returns, where that can't be inferred without data: an example of it (its
            tensors may be on the meta device), or a function from the stage's inputs (on the meta device) to
            one. With ``input_args``, the example's first dimension follows that of the inputs.
        output_grads: has no effect: gradients have the shapes and dtypes of their values.
        input_grads: has no effect.
        group: the process group of the pipeline's ranks; None: the default group.
        dw_builder: for a module that delays the gradients of its weights by itself; see `Stage`. The backward
            pass of any other module is split without one.
        get_mesh: has no effect: what crosses borders is no DTensor.
        comm: what the ranks talk through, in place of ``group``.
        routes: from `draft_routes`, where parameters of several stages are tied; the same on every rank.
        bind: from what ``step()`` is given to the positional arguments that the module is called with (on the
            first stage); there are no keyword arguments then.
        recompute: see `Stage`.

    Raises:
        ArgumentError: an index out of range, or both ``group`` and ``comm``.

    >>> stage = PipelineStage(nn.Linear(4, 4), 0, 2, torch.device("cpu"))
    >>> stage.index, stage.is_last
    (0, False)
    """

    def __init__(
        self,
        submodule: Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,  # noqa: ARG002 - torch's
        input_grads: Any = None,  # noqa: ARG002 - likewise
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[[], object]] | None = None,
        get_mesh: Callable[..., Any] | None = None,  # noqa: ARG002 - likewise
        *,
        comm: Comm | None = None,
        routes: Routes | None = None,
        bind: Bind | None = None,
        recompute: bool = False,
    ) -> None:
        if not isinstance(submodule, Module):
            raise ArgumentError(
                f"submodule is a {type(submodule).__name__}: give a torch.nn.Module that calls it in forward"
            )
        if not 0 <= stage_index < num_stages:
            raise ArgumentError(
                f"stage_index is {stage_index}: of {num_stages} stages it is 0 to {num_stages - 1}"
            )
        check_group_or_comm(group, comm)
        there = torch.device(device)
        super().__init__(submodule, stage_index, routes or draft_routes(num_stages), there, comm=comm)
        self.bind = bind
        self.recompute = recompute
        self._site = stage_index
        self.dw_builder = dw_builder
        self.group = group
        self._declared: Declared | None = declared_outputs(input_args, output_args)
        self._crossings: dict[Any, tuple[Crossing, tuple[bool, ...]]] = {}
        self._incoming: Sequence[Crossing] = ()
        self._outgoing: Sequence[Crossing] = ()
        self._keywords: Sequence[Mapping[str, Any]] = ()
        self._own_memory: frozenset[int] = frozenset()

    def outgoing(self, incoming: Crossing, keywords: Mapping[str, Any]) -> tuple[Crossing, tuple[bool, ...]]:
        """What it returns for such inputs, and for each of their leaves (keyword arguments last) whether the
        module writes to it.
        """
        (module,) = stage_modules(self.module)
        key = (incoming.key, input_key(dict(keywords)), _state(module, self.device))
        if key not in self._crossings:
            if len(self._crossings) >= _KEPT:
                self._crossings.clear()
            args = arguments_of(incoming.on_meta())
            if self._declared is not None:
                output = self._declared(module, args, keywords)
                written = [True] * len(flatten((args, dict(keywords)))[0])
            else:
                output, written = inferred(module, args, keywords, self.device, self.index)
            refuse_distributed(output, output_name(self.index))
            self._crossings[key] = Crossing.of(output, output_name(self.index)), tuple(written)
        return self._crossings[key]

    def prepare(
        self,
        incoming: Sequence[Crossing],
        outgoing: Sequence[Crossing],
        keywords: Sequence[Mapping[str, Any]],
        crossing: tuple[Routes, ...],
    ) -> None:
        """Get ready for a step: what comes in and goes out for each microbatch."""
        self._incoming, self._outgoing, self._keywords = incoming, outgoing, keywords
        slots = tensor_slots(self._inner)
        own = (tensor for *_, tensor in slots if not isinstance(tensor, nn.Parameter))
        self._own_memory = frozenset(map(_address, own)) - {0}
        self.crossing = crossing
        self.follow(crossing[0])

    def _example(self, name: str) -> tuple[Sequence[int], Sequence[int]] | None:
        incoming = self._incoming[0]
        leaves = zip(incoming.leaves, incoming.strides, strict=True)
        strides = next(strides for leaf, strides in leaves if leaf.name == name)
        shape: Any = self._crossing.values[name].shape  # numbers
        return shape, strides

    def _arguments(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        incoming = self._incoming[self._microbatch]
        tensors = {value.name: tensor for value, tensor in zip(incoming.values, inputs, strict=True)}
        return arguments_of(incoming.filled(tensors)), self._keywords[self._microbatch]

    def _outputs(self, output: Any) -> Sequence[Tensor]:
        if self.is_last:
            self._result = output
            return ()
        outgoing = self._outgoing[self._microbatch]
        outputs = outgoing.tensors(output, f"stage {self.index}")
        return [
            self._ready(tensor, value.requires_grad)
            for tensor, value in zip(outputs, outgoing.values, strict=True)
        ]

    def _ready(self, tensor: Tensor, requires_grad: bool) -> Tensor:
        """A tensor as it may be sent: copied where it lies in a buffer, which the next microbatch may write
        to, and requiring a gradient where other stages will send one.
        """
        if _address(tensor) in self._own_memory:
            tensor = copied(tensor)
        if requires_grad and torch.is_grad_enabled() and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
        return tensor


def draft_routes(stages: int, tied: Sequence[Tied] = ()) -> Routes:
    """The routes of a chain of stages before any shape is known.

    Args:
        tied: parameters that several stages hold.
    """
    ways = range(stages - 1)
    backward: dict[tuple[int, int], tuple[str, ...]] = {(stage + 1, stage): () for stage in ways}
    for group in tied:
        if group.value.requires_grad:
            for earlier, later in pairwise(group.stages):
                backward[later, earlier] = (*backward.get((later, earlier), ()), group.value.name)
    return Routes(
        borders=(StageBorder((), ()),) * stages,
        values={group.value.name: group.value for group in tied},
        forward={(stage, stage + 1): () for stage in ways},
        backward=backward,
        inputs=(),
        results=(),
        tied=tuple(tied),
        tags=_tags(backward),
    )


def tag_of(start: int, to: int, number: int) -> int:
    """The tag of the value of that number among those that cross between two neighbours; 0: the trailer."""
    return 2 * (min(start, to) * MOST_VALUES + number) + (start > to)


def _tags(backward: Mapping[tuple[int, int], Sequence[str]]) -> dict[tuple[str, int, int], int]:
    """The tags of tied parameters' gradients, which come after those of all borders."""
    links = [(name, *pair) for pair, names in sorted(backward.items()) for name in (TRAILER, *names)]
    last = 2 * MOST_VALUES * (1 + max((start for start, _ in backward), default=0))
    return {link: last + number for number, link in enumerate(links)}


def _state(module: nn.Module, device: torch.device) -> Any:
    """What decides, besides the inputs, what a module returns."""
    kind = device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    return (
        id(module),
        tuple(child.training for child in module.modules()),
        tuple((value.requires_grad, value.dtype, value.shape) for value in module.parameters()),
        autocast,
        torch.get_default_dtype(),
    )


def _address(tensor: Tensor) -> int:
    """Of a tensor's memory; 0 for one that has none of its own, such as a sparse one."""
    storage = storage_of(tensor)
    return 0 if storage is None else storage.data_ptr()
