"""``prepare_pippy`` of ``accelerate.inference``, on a pipeline of partita's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn

from partita._torch.containers.pytree import flatten, tree_map
from partita.errors import ArgumentError, CaptureError
from partita.integrations.balanced_split_points import balanced_split_points
from partita.integrations.broadcast_value import broadcast_value
from partita.pipelining import Pipe, ScheduleGPipe, SplitPoint, pipeline
from partita.pipelining.frontends.cuts.cuts import Place
from partita.pipelining.stages import Stage
from partita.runtime import Comm, ProcessGroupComm
from partita.runtime.publish_errors import publish_errors

__all__ = ["prepare_pippy"]


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | Sequence[str] | None = "auto",
    no_split_module_classes: Sequence[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Let a call of ``model`` run in a pipeline for inference, with one stage a process. Collective.

    A call is one on every process; arguments count on the first. The last has the output, of the type that
    the model returns, and the others None, or with ``gather_output`` a copy. It runs without gradients, in
    the mode (``train()``, ``eval()``) that the model is in, over microbatches; so results are bit for bit
    those of the uncut model over the same microbatches. Numbers (a loss) come as one number a microbatch.

    The model is changed as accelerate changes it: its ``forward`` runs the pipeline, ``hf_split_points`` has
    the split points, ``pippy_stage`` the schedule. On one process it stays as it is.

    Args:
        split_points: names of the modules at which all stages but the first begin. ``"auto"``, or None, gives
            each stage about as many bytes of parameters.
        no_split_module_classes: names of classes whose modules ``"auto"`` leaves in one piece; without it
            those that the model names (``_no_split_modules``).
        example_args: example inputs. Their batch may have another size than that of later calls, if the model
            allows it.
        example_kwargs: example inputs by name. Calls pass the same names.
        num_chunks: the number of microbatches, one a process if not given. A smaller batch is cut into as
            many as it has samples.
        gather_output: whether every process gets the output.

    Raises:
        ArgumentError: there are not as many split points as processes less one.
        CaptureError: the model can't be cut, neither as a graph nor at its modules.
    """
    state = PartialState()
    processes = dist.get_world_size() if dist.is_initialized() else 1
    names = _names(model, split_points, no_split_module_classes, processes)
    if num_chunks is not None and num_chunks < 1:
        raise ArgumentError(f"num_chunks is {num_chunks}: give at least 1, or None for one a process")
    model.hf_split_points = names  # type: ignore[assignment]
    if processes == 1:
        return model
    args, kwargs = tree_map(_on_cpu, (tuple(example_args or ()), dict(example_kwargs or {})))
    pipe = _cut(model, args, kwargs, names)
    comm = ProcessGroupComm.from_group()
    stage = pipe.build_stage(comm.rank, state.device, comm=comm)
    run = _PipelinedForward(stage, comm, num_chunks or processes, bool(gather_output))
    model.pippy_stage = run.schedule(run.chunks)  # type: ignore[assignment]
    model.forward = MethodType(run, model)
    return model


class _PipelinedForward:
    """Takes the place of a model's ``forward``.

    Args:
        stage: of this rank.
        chunks: the number of microbatches.
        gather_output: whether every rank gets the output.
    """

    def __init__(self, stage: Stage, comm: Comm, chunks: int, gather_output: bool) -> None:
        self.stage = stage
        self.comm = comm
        self.chunks = chunks
        self.gather_output = gather_output
        self._schedules: dict[int, ScheduleGPipe] = {}

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = self.comm.rank == 0
        with publish_errors(self.comm, "reading the size of a batch"):
            samples = self.comm.all_gather_object(_samples(args, kwargs) if first else None)[0]
        schedule = self.schedule(min(self.chunks, samples))
        self.stage.module.train(model.training)
        if first:
            args, kwargs = tree_map(self._on_device, (args, kwargs))
            output = schedule.eval(*args, **kwargs)
        else:
            output = schedule.eval()
        if not self.gather_output:
            return output
        return broadcast_value(self.comm, output, self.comm.size - 1, self.stage.device)

    def schedule(self, chunks: int) -> ScheduleGPipe:
        """The schedule of that many microbatches. Collective where there was none yet."""
        if chunks not in self._schedules:
            self._schedules[chunks] = ScheduleGPipe(self.stage, chunks)
        return self._schedules[chunks]

    def _on_device(self, leaf: Any) -> Any:
        return leaf.to(self.stage.device) if isinstance(leaf, Tensor) else leaf


def _names(
    model: nn.Module,
    split_points: Literal["auto"] | Sequence[str] | None,
    no_split_module_classes: Sequence[str] | None,
    processes: int,
) -> list[str]:
    if split_points is None or isinstance(split_points, str):
        if split_points not in (None, "auto"):
            raise ArgumentError(f"split_points is {split_points!r}: give 'auto' or a list of module names")
        whole = no_split_module_classes
        if whole is None:
            whole = getattr(model, "_no_split_modules", None)
        return balanced_split_points(model, processes, whole or ())
    names = list(split_points)
    if len(names) != processes - 1:
        raise ArgumentError(
            f"{len(names)} split points make {len(names) + 1} stages, but there are {processes} processes: "
            f"give {processes - 1} split points, or start {len(names) + 1} processes"
        )
    return names


def _cut(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> Pipe:
    spec: dict[Place, SplitPoint] = dict.fromkeys(names, SplitPoint.BEGINNING)
    with torch.no_grad():
        try:
            return pipeline(model, args, kwargs, spec)
        except CaptureError:
            return pipeline(model, args, kwargs, spec, frontend="modules")


def _samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The size of the batch; 1 where there is none."""
    leaves = flatten((args, kwargs))[0]
    return max([leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()], default=1) or 1


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf
