"""The schedules that users call: ``ScheduleGPipe(stage, n_microbatches, loss_fn).step(x, target=y)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from partita.capture.proving.autocasts import current_autocast
from partita.errors import ScheduleError, SignatureMismatch
from partita.pipelining.interface.routes import Routes, TiedGradients
from partita.pipelining.stages.placing.state_of_stage import stages_to_run
from partita.pipelining.stages.stage import Stage
from partita.pipelining.stages.step_count import StepCount
from partita.pipelining.steps.loss_weights import LossWeights, check_targets, step_weights
from partita.pipelining.steps.preparing.agreement import StepAgreement, agree_on_placement, rank_pairs
from partita.pipelining.steps.preparing.arguments import Cutting, LossSide, StepArguments
from partita.pipelining.steps.preparing.modes import follow_modes, mode_name
from partita.pipelining.steps.preparing.precision import fresh_casts
from partita.pipelining.steps.preparing.preparation import PreparedStep
from partita.pipelining.steps.preparing.step_preparation import step_preparation
from partita.pipelining.steps.running.actions import Actions
from partita.pipelining.steps.running.custom_functions import PipelineContext
from partita.pipelining.steps.running.executor import Executor, StepInputs
from partita.pipelining.tied.tied_parameters import TiedParameters
from partita.pipelining.tied.tied_sum import with_chains
from partita.planning import Schedule, get_schedule
from partita.runtime import NULL_TRACER, Comm, ProcessGroupComm, Recorder
from partita.runtime.failures.thread_activity import doing
from partita.runtime.freed_memory import give_back_freed_memory, keep_freed_memory
from partita.runtime.microbatches import merge_step
from partita.runtime.one_at_a_time import one_at_a_time
from partita.runtime.publish_errors import closed_on_error, publish_errors

__all__ = ["PipelineSchedule", "ScheduleOptions"]

_ALIKE = (SignatureMismatch, ScheduleError)
"""What every rank raises alike where a schedule can't be made."""


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The options of a schedule; see `PipelineSchedule`."""

    cutting: Cutting
    output_merge_spec: Any
    scale_grads: bool
    seed: int
    tied_gradients: TiedGradients

    def alike(self) -> dict[str, object]:
        """The options that must be the same on all ranks, by name."""
        return {
            "n_microbatches": self.cutting.count,
            "seed": self.seed,
            "scale_grads": self.scale_grads,
            "tied_gradients": self.tied_gradients,
        }


class PipelineSchedule:
    """Runs this rank's stages. `Schedule1F1B` and `ScheduleGPipe` are the ones to use.

    Making one is collective: all ranks do it, with stages of the same cut.

    Args:
        stages: the stage of this rank, or all of its stages.
        n_microbatches: into how many the batch is cut.
        loss_fn: from (output, target) to a 0-d tensor; on all ranks or none. Without it `step` only runs
            forward.
        args_chunk_spec: how positional arguments are cut; along dim 0 if not given.
        kwargs_chunk_spec: how keyword arguments are cut.
        output_merge_spec: how the microbatches' outputs are merged; along dim 0 if not given.
        scale_grads: the losses' gradients are weighted with each microbatch's share of the batch, so that
            they add up to the gradient of the mean; without it they are summed.
        seed: of the random numbers, which depend on (seed, step, microbatch, call site) alone.
        tied_gradients: of a parameter that several stages hold: ``exact``: bit for bit as uncut, one message
            of its size a microbatch and holder; ``reduced``: one sum a step, which rounds differently (about
            1e-6). Stages follow the last schedule that was made with them.
        tracer: records what runs when; may be replaced between two steps.

    Raises:
        SignatureMismatch: the ranks do not agree on stages, schedule or microbatches.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "_step_microbatches" in vars(cls):
            raise ScheduleError(
                f"{cls.__name__} defines _step_microbatches, which nothing calls here: give the order of its "
                "actions, in pipeline_order or as what _get_pipeline_order() returns"
            )

    def __init__(
        self,
        stages: Stage | Sequence[Stage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: Sequence[Any] | None = None,
        kwargs_chunk_spec: Mapping[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        seed: int = 0,
        tied_gradients: TiedGradients = "exact",
        tracer: Recorder = NULL_TRACER,
    ) -> None:
        own_stages = stages_to_run(stages)
        cutting = Cutting(n_microbatches, args_chunk_spec, kwargs_chunk_spec, own_stages[0].example)
        self.options = ScheduleOptions(cutting, output_merge_spec, scale_grads, seed, tied_gradients)
        self.stages = {stage.index: stage for stage in own_stages}
        self.tracer = tracer
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._count = StepCount(*[max(stage.step_count.start for stage in own_stages)] * 2)
        for stage in own_stages:
            stage.step_count = self._count
        with doing("making a schedule"):
            first = own_stages[0]
            self.comm: Comm = first.comm or ProcessGroupComm.from_group(first.group).used_by(self)
        self._actions = Actions(self.stages, self.comm, loss_fn or first.loss_fn)
        with closed_on_error(self.comm, "making a schedule", _ALIKE) if self._owns_comm else nullcontext():
            self._join(own_stages)

    def _join(self, stages: Sequence[Stage]) -> None:
        """Agree with the other ranks on what is run, and connect to those that this one exchanges with."""
        keep_freed_memory(self)
        for stage in stages:
            stage.by_mode = with_chains(stage.by_mode, self.options.tied_gradients == "exact")
            stage.follow(stage.by_mode.in_mode(stage.module.training))
        by_mode, count = stages[0].by_mode, self.n_microbatches
        settings = {"the schedule": self.kind or type(self).__name__, **self.options.alike()}
        self.stage_ranks = agree_on_placement(self.comm, stages, settings)
        self._check_settings()
        self._actions.training = self._generate(self.kind) if self.kind else None
        self._tied = TiedParameters(self.comm, self.stages, self.stage_ranks)
        self._agreement = StepAgreement(self.comm, by_mode, self.stage_ranks, count, stages)
        self._preparation = step_preparation(self.comm, self.stages, self.stage_ranks, count)
        pairs = rank_pairs(by_mode, self.stage_ranks)
        self.comm.connect({pair for a, b in sorted(pairs) for pair in ((a, b), (b, a))}, stages[0].device)

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.options.cutting.count

    @property
    def scale_grads(self) -> bool:
        """Whether gradients are those of the mean over the batch; the same on every rank."""
        return self.options.scale_grads

    @scale_grads.setter
    def scale_grads(self, scale_grads: bool) -> None:
        self.options = replace(self.options, scale_grads=scale_grads)

    @property
    def seed(self) -> int:
        """The seed of the random numbers."""
        return self.options.seed

    @property
    def tied_gradients(self) -> TiedGradients:
        """How the gradients of parameters of several stages are summed; see the class."""
        return self.options.tied_gradients

    @property
    def routes(self) -> Routes:
        """What crosses borders, in the mode that the stages were last run in."""
        return self._first.routes

    @property
    def _first(self) -> Stage:
        return next(iter(self.stages.values()))

    @property
    def _owns_comm(self) -> bool:
        return self._first.comm is None

    @property
    def loss_fn(self) -> Callable[..., Tensor] | None:
        """From (output, target) to a 0-d tensor; another one may be set between two steps."""
        return self._actions.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[..., Tensor] | None) -> None:
        self._actions.loss_fn = loss_fn
        self._actions.recompile()

    def schedule(self, *, train: bool = True) -> Schedule:
        """What every rank does in one step, sends and receives included."""
        return self._executor(train).schedule

    def state_dict(self) -> dict[str, int]:
        """How many steps have been made, on which random numbers depend; checkpoints of stages have it."""
        return {"steps": self._count.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue counting from ``state``."""
        self._count.steps = state["steps"]

    def close(self) -> None:
        """Close the comm it made, and give freed memory back. If not called: when it is gone, or at exit."""
        give_back_freed_memory(self)
        if self._owns_comm:
            self.comm.close()

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        loss_weights: LossWeights | Sequence[float] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Any] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one batch; gradients are added to ``.grad``. Collective. In a schedule
        without ``loss_fn``, or without a backward pass, it is `eval`.

        A batch is given whole, and cut here, or as microbatches, which may have different sizes. Each rank
        gives its own arguments in one of the two ways.

        Args:
            args: the model's arguments, on the rank that holds the first stage; ignored elsewhere.
            target: what ``loss_fn`` compares with, on the rank that holds the last stage.
            losses: gets the loss of each microbatch, on the rank that holds the last stage.
            loss_weights: the weight of each microbatch's loss, in place of its share of the batch, on the
                rank that holds the last stage: for a loss that is a mean over what a mask leaves. A plain
                sequence must sum to 1; `LossWeights` makes weights from counts, or allows another sum.
            return_outputs: False: drop the results once their loss is computed, which saves memory where they
                are large (the logits of a language model).
            loss_kwargs: further arguments of ``loss_fn``, not cut into microbatches, on the rank that holds
                the last stage.
            arg_mbs: in place of ``args``: for each microbatch a tuple of its positional arguments.
            kwarg_mbs: in place of ``kwargs``: for each microbatch a dict of its keyword arguments.
            target_mbs: in place of ``target``: one for each microbatch.
            kwargs: the model's keyword arguments, where ``args`` are.

        Returns:
            The merged output on the rank that holds the last stage, None elsewhere.

        Raises:
            ExecutionError: a ``loss_fn`` that does not return a 0-d tensor.
            MicrobatchError: a batch that can't be cut, another number of microbatches, or weights that can't
                be used.
            ScheduleError: the schedule has not been given its actions yet, or they break a rule.
            SignatureMismatch: shapes that the pipeline was not cut for, or ranks that are about to do
                different things.
            PeerFailed: another rank failed.
        """
        train = not self._actions.forward_only
        batch = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        loss = losses, loss_kwargs or {}, loss_weights
        return self._runs()(StepArguments(self.options.cutting, train, return_outputs, *batch, *loss))

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Any] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward of one batch without gradients. Collective. Arguments are those of `step`.

        Modules stay in their mode: call ``stage.module.eval()`` first where that matters. ``losses`` is
        filled where there are a ``loss_fn`` and a target, and where the loss is the model's own.
        """
        batch = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        loss = losses, loss_kwargs or {}
        return self._runs()(StepArguments(self.options.cutting, False, return_outputs, *batch, *loss))

    def _run(self, arguments: StepArguments) -> Any:
        train = arguments.train
        what = f"{'step()' if train else 'eval()'} number {self._count.steps} of {type(self).__name__}"
        alone = one_at_a_time(self.comm, what, self.stages.values(), indivisible=True)
        with alone, doing(what), nullcontext() if train else torch.no_grad():
            with publish_errors(self.comm, "preparing a step"):
                inputs = self._prepare(arguments)
                executor = self._executor(train)
                if train:
                    self._tied.begin(self.routes)
            with fresh_casts():
                results = executor.run(inputs, self.tracer)
            if train:
                with publish_errors(self.comm, "sharing the gradients of tied parameters"):
                    self._tied.end(self.routes, self._count.steps)
                self._count.steps += 1
            if arguments.losses is not None:
                arguments.losses[:] = results.losses
            return merge_step(results.outputs, self.options.output_merge_spec, inputs.samples)

    _run_untraced = torch.compiler.disable(_run)

    def _runs(self) -> Callable[[StepArguments], Any]:
        """What runs a step: within a function that Dynamo traces, in a frame of its own that keeps it out."""
        return self._run_untraced if torch.compiler.is_dynamo_compiling() else self._run

    def _prepare(self, arguments: StepArguments) -> StepInputs:
        # what this rank can find wrong by itself, before it waits for another
        self._check_tied_gradients()
        follow_modes(self.stages.values(), train=arguments.train)
        if arguments.train:
            self._ordered()
        last = self.routes.stages - 1 in self.stages
        loss_side = arguments.for_loss(last=last, scaled=self.options.scale_grads)
        accepted = self._preparation.accept(arguments)
        # what the ranks can find wrong together, before anything is computed
        symbols = len(self.routes.symbols)
        what, train = self._announcement(arguments.train), arguments.train
        sizes = self._agreement.agree(what, accepted.sizes, symbols, train=train)
        prepared = self._preparation.prepare(replace(accepted, sizes=sizes))
        if prepared.changed:
            self._actions.recompile()
        return self._inputs(arguments, loss_side, prepared)

    def _announcement(self, train: bool) -> str:
        """What the other ranks must be about to do, too."""
        mode = mode_name(self.stages.values())
        autocast = current_autocast(self._first.device.type)
        under = "" if autocast is None else f" under {autocast}"
        what = "step()" if train else "eval()" if self.loss_fn else "eval() or step() without loss_fn"
        name = self._actions.name if train else ""  # the others may have been given another
        return f"{what}{name} number {self._count.steps}{self._agreement.of_schedule} in {mode}{under}"

    def _check_tied_gradients(self) -> None:
        """A schedule made later may have changed what its stages send."""
        tied_gradients = self.options.tied_gradients
        for index, stage in self.stages.items():
            if any(group.chained != (tied_gradients == "exact") for group in stage.by_mode.tied):
                raise ScheduleError(
                    f"stage {index} was given to another schedule since, with other tied_gradients than "
                    f"{tied_gradients!r}, and follows that one: make both with the same, or give each "
                    "a stage of its own"
                )

    def _executor(self, train: bool) -> Executor:
        generate = self._ordered if train else partial(self._generate, "ForwardOnly")
        return self._actions.executor(generate, train=train)

    def _ordered(self) -> Schedule:
        """The actions of training, with sends and receives only where the user gave them."""
        if self._actions.training is None:
            raise ScheduleError(f"{type(self).__name__} has no actions yet: give it their order")
        return self._actions.training

    def _generate(self, kind: str) -> Schedule:
        """The schedule of that kind, without sends and receives."""
        stages = len(self.stage_ranks)
        return get_schedule(kind).generate(stages, self.n_microbatches, placement=self.stage_ranks)

    def _check_settings(self) -> None:
        """Refuse settings that are wrong on every rank alike."""
        n_microbatches = self.n_microbatches
        if type(self) is PipelineSchedule:
            raise ScheduleError(
                "PipelineSchedule is the base of the schedules: use Schedule1F1B or ScheduleGPipe"
            )
        if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ScheduleError(f"n_microbatches is {n_microbatches!r}: give a whole number of at least 1")

    def _inputs(self, arguments: StepArguments, loss_side: LossSide, prepared: PreparedStep) -> StepInputs:
        check_targets(loss_side.cut, prepared.samples, arguments.target)
        shares = loss_side.weights
        if shares is None:
            scaled = self.options.scale_grads
            shares = step_weights(None, prepared.samples, self.n_microbatches, scaled=scaled)
        scale = self.loss_scale()
        return StepInputs(
            prepared.arguments,
            loss_side.targets,
            tuple(share * scale for share in shares),
            self.options.seed,
            self._count.steps,
            prepared.routes,
            arguments.keep_outputs,
            arguments.loss_keywords,
            self._context(arguments, loss_side.targets) if self._actions.functions else None,
            self.options.cutting.samples_of_each(prepared.samples),
        )

    def _context(self, arguments: StepArguments, targets: Sequence[Any] | None) -> PipelineContext:
        """What custom functions are given in a step."""
        parts = arguments.in_microbatches(first=0 in self.stages).parts
        args, kwargs = [part[0] for part in parts], [part[1] for part in parts]
        targets = None if targets is None else list(targets)
        return PipelineContext(self, args, kwargs, targets, arguments.losses)
