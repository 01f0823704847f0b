"""Torch's bases of the schedules, whose order of actions may come from a user's subclass or from a file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from torch import Tensor

from partita.errors import ScheduleError
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.running.custom_functions import CustomFunction, checked_kind
from partita.pipelining.steps.running.messages import with_messages
from partita.pipelining.steps.schedules import PipelineSchedule
from partita.planning import Action, ActionKind, Schedule

__all__ = [
    "Order",
    "PipelineScheduleMulti",
    "PipelineScheduleRuntime",
    "PipelineScheduleSingle",
    "ScheduleFormat",
]

Order = MutableMapping[int, Sequence[Any]]
"""What each rank does, in order: an `Action`, its text (``"0F1"``), or None where the rank idles."""

ScheduleFormat = Literal["compute_only", "compute_comms"]
"""Without and with sends and receives."""

_Stages = Stage | Sequence[Stage]
_Loss = Callable[..., Tensor] | None


class _Ordered(PipelineSchedule):
    """A schedule whose order of actions can be read, and given where the class has none."""

    def __init__(self, stages: _Stages, n_microbatches: int, loss_fn: _Loss, *args: Any, **options: Any):
        super().__init__(stages, n_microbatches, loss_fn, *args, **options)
        actions = self._actions.training
        self._order: Order = {} if actions is None else _order_of(actions.compute_only())

    @property
    def pipeline_order(self) -> Order:
        """What each rank computes, in order. A subclass of one's own fills or sets it before the first step;
        from then on it can be set, but not changed in place.
        """
        return self._order

    @pipeline_order.setter
    def pipeline_order(self, order: Mapping[int, Sequence[Any]]) -> None:
        self._order = {rank: list(row) for rank, row in order.items()}
        self._actions.replace(None, from_user=False)

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The rank in the pipeline of each stage."""
        return dict(enumerate(self.stage_ranks))

    @property
    def pp_group_size(self) -> int:
        """How many ranks there are."""
        return self.comm.size

    @property
    def rank(self) -> int:
        """The rank of this process in the pipeline."""
        return self.comm.rank

    @property
    def _n_microbatches(self) -> int:
        return self.n_microbatches

    @property
    def _num_stages(self) -> int:
        return self.routes.stages

    @property
    def _stages(self) -> list[Stage]:
        return list(self.stages.values())

    @property
    def pipeline_order_with_comms(self) -> Order:
        """What each rank does, in order, sends and receives included."""
        return _order_of(self.schedule())

    def _ordered(self) -> Schedule:
        if self._actions.training is None:
            if not any(self._order.values()):
                raise ScheduleError(
                    f"{type(self).__name__} has no actions yet: call _load_csv(path), or fill pipeline_order"
                )
            self._replace_order(self._order)
        return super()._ordered()

    def _replace_order(self, order: Mapping[int, Sequence[Any]]) -> None:
        """Run these actions from now on.

        Raises:
            ScheduleError: they break a rule, or have a stage on another rank than that which holds it.
        """
        unknown = sorted(set(order) - set(range(self.comm.size)))
        if unknown:
            raise ScheduleError(f"there is no rank {unknown[0]}: the pipeline has {self.comm.size}")
        rows = tuple(
            tuple(_action(rank, cell) for cell in order.get(rank, ())) for rank in range(self.comm.size)
        )
        schedule = Schedule(type(self).__name__, self.stage_ranks, self.n_microbatches, rows)
        with_messages(schedule, self.routes.edges)  # raises where a rule is broken
        self._actions.replace(schedule, from_user=True)
        self._order = _order_of(schedule.compute_only())


class PipelineScheduleSingle(_Ordered):
    """The base of `ScheduleGPipe` and `Schedule1F1B`, which are meant for one stage a rank. A subclass of
    one's own says in ``_get_pipeline_order()`` what each rank computes.

    Args:
        stage: this rank's; several are taken too.

    See `PipelineSchedule` for the others.

    >>> class Sequential(PipelineScheduleSingle):
    ...     def _get_pipeline_order(self):
    ...         n = range(self.n_microbatches)
    ...         return {0: [f"0{kind}{m}" for m in n for kind in "FB"]}
    """

    def __init__(
        self,
        stage: _Stages,
        n_microbatches: int,
        loss_fn: _Loss = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        **options: Any,
    ) -> None:
        if type(self) is PipelineScheduleSingle:
            raise ScheduleError(
                "PipelineScheduleSingle is the base of schedules for one stage a rank: use Schedule1F1B or "
                "ScheduleGPipe, or a subclass with _get_pipeline_order()"
            )
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        super().__init__(stage, n_microbatches, loss_fn, *specs, scale_grads, **options)
        if not self.kind:
            self._replace_order(self._get_pipeline_order() or {})

    @property
    def _stage(self) -> Stage:
        return next(iter(self.stages.values()))

    def _get_pipeline_order(self) -> Mapping[int, Sequence[Any]] | None:
        """What each rank computes, in order, as `Order` has it."""
        return None if self._actions.training is None else self.pipeline_order


class PipelineScheduleMulti(_Ordered):
    """The base of the schedules for several stages a rank. Its order of actions comes from a subclass that
    fills `pipeline_order`, or from a file.

    Args:
        use_full_backward: has no effect, as in torch.
        backward_requires_autograd: has no effect: the backward pass always goes through autograd, and stages
            that train nothing are recognised.

    See `PipelineSchedule` for the others.
    """

    def __init__(
        self,
        stages: _Stages,
        n_microbatches: int,
        loss_fn: _Loss = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        use_full_backward: bool | None = None,  # noqa: ARG002
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,  # noqa: ARG002
        **options: Any,
    ) -> None:
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        super().__init__(stages, n_microbatches, loss_fn, *specs, scale_grads, **options)

    def _load_csv(self, filename: str | Path, format: ScheduleFormat = "compute_only") -> None:  # noqa: A002 - torch's
        """Run the actions in a file: one line a rank, as `Schedule.to_csv` and torch write it. All ranks load
        the same one.

        Args:
            format: ``compute_only``: the file has no sends and receives; ``compute_comms``: it has them, and
                they are kept if they are right for this model's borders.

        Raises:
            ScheduleError: not such a file, or actions that can't be run.
        """
        if format not in ("compute_only", "compute_comms"):
            raise ScheduleError(f"format is {format!r}: give 'compute_only' or 'compute_comms'")
        try:
            text = Path(filename).read_text(encoding="utf-8")
            loaded = Schedule.from_csv(text, stage_ranks=self.stage_ranks, microbatches=self.n_microbatches)
        except (OSError, UnicodeDecodeError, ScheduleError) as error:
            raise ScheduleError(f"{str(filename)!r} can't be read as a schedule: {error}") from error
        if format == "compute_only" and loaded.is_lowered:
            raise ScheduleError(f"{filename} has sends and receives: load it with format='compute_comms'")
        self._replace_order(_order_of(loaded))

    def _dump_csv(self, filename: str | Path, format: ScheduleFormat = "compute_only") -> None:  # noqa: A002 - torch's
        """Write what each rank does to a file that `_load_csv` reads."""
        schedule = self._ordered().compute_only() if format == "compute_only" else self.schedule()
        Path(filename).write_text(schedule.to_csv(), encoding="utf-8")

    def _validate_and_set_stage_mapping(self, actions: Mapping[int, Sequence[Any]]) -> None:
        """Run these actions from now on; ScheduleError where they can't be run."""
        self._replace_order(actions)


class PipelineScheduleRuntime(PipelineScheduleMulti):
    """`PipelineScheduleMulti` that also takes sends and receives as they are given.

    Args:
        defer_pp_recv: post each receive right before the pass that needs its message, rather than ahead of
            it.
    """

    def __init__(
        self,
        stages: _Stages,
        n_microbatches: int,
        *args: Any,
        defer_pp_recv: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(stages, n_microbatches, *args, **options)
        self._actions.defer_receives = defer_pp_recv

    def _dump_csv(self, filename: str | Path, format: ScheduleFormat = "compute_comms") -> None:  # noqa: A002 - torch's
        """Write what each rank does to a file that `_load_csv` reads."""
        super()._dump_csv(filename, format)

    def register_custom_function(self, computation_type: ActionKind, custom_function: CustomFunction) -> None:
        """Call a function in place of each action of a kind, in training and, where the kind occurs, in
        evaluation. It does what the schedule would do by ``ctx.run(action)``, and what else it likes around
        it::

            def timed(action, ctx):
                start = time.perf_counter()
                ctx.run(action)
                print(action, time.perf_counter() - start)

            schedule.register_custom_function(ActionKind.F, timed)

        UNSHARD, RESHARD and REDUCE_GRAD are added to the order where it has none. An OVERLAP_F_B is one
        action: functions for F and B are not called for its parts. Ranks may have different functions.

        Args:
            computation_type: any kind but sends and receives.
            custom_function: called with the action and a ``PipelineContext``. It replaces an earlier one,
                with a warning.

        Raises:
            ScheduleError: a kind that can't have one. In a step: a pass that the function has not run, or has
                run twice.
        """
        kind = checked_kind(computation_type)
        if kind in self._actions.functions:
            warnings.warn(f"the custom function for {kind} is replaced by another", UserWarning, stacklevel=2)
        self._actions.functions[kind] = custom_function
        self._actions.recompile()

    def _prepare_schedule_with_comms(
        self,
        actions: Mapping[int, Sequence[Any]],
        format: ScheduleFormat = "compute_only",  # noqa: A002 - torch's
    ) -> None:
        """Run these actions from now on, with their own sends and receives where they have any."""
        cells = (_action(rank, cell) for rank, row in actions.items() for cell in row)
        lowered = any(cell is not None and cell.is_communication for cell in cells)
        if lowered and format == "compute_only":
            raise ScheduleError("the actions have sends and receives: give format='compute_comms'")
        self._replace_order(actions)


def _order_of(schedule: Schedule) -> Order:
    """A read-only view: a change would have no effect."""
    return cast("Order", MappingProxyType(dict(enumerate(schedule.rows))))


def _action(rank: int, cell: Any) -> Action | None:
    """From an `Action`, its text, or torch's own kind of action."""
    if cell is None or isinstance(cell, Action):
        return cell
    text = str(cell).strip()
    try:
        return Action.parse(text) if text else None
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}: {error}") from error
