"""The schedules that users call: ``ScheduleGPipe(stage, n_microbatches, loss_fn).step(x, target=y)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from partita.errors import ScheduleError, SignatureMismatch
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.manual import PipelineStage
from partita.pipelining.stages.stage import Stage
from partita.pipelining.stages.step_count import StepCount
from partita.pipelining.steps.actions import Actions
from partita.pipelining.steps.agreement import StepAgreement, agree_on_placement, rank_pairs
from partita.pipelining.steps.arguments import Cutting, LossSide, Microbatches, StepArguments
from partita.pipelining.steps.custom_functions import PipelineContext
from partita.pipelining.steps.executor import Executor, StepInputs
from partita.pipelining.steps.loss_weights import LossWeights, step_weights
from partita.pipelining.steps.precision import current_autocast, fresh_casts
from partita.pipelining.steps.preparation import CapturedPreparation, PreparedStep, StepPreparation
from partita.pipelining.steps.shape_exchange import ShapeExchange
from partita.pipelining.tied.tied_parameters import TiedParameters
from partita.pipelining.tied.tied_sum import TiedGradients, with_chains
from partita.planning import Schedule, get_schedule
from partita.runtime import NULL_TRACER, Comm, ProcessGroupComm, Recorder, merge
from partita.runtime.publish_errors import closed_on_error, publish_errors
from partita.runtime.whereabouts import doing

__all__ = ["PipelineSchedule", "ScheduleOptions"]

_ALIKE = (SignatureMismatch, ScheduleError)
"""What every rank raises by itself where a schedule can't be made."""


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """What a schedule was made with; see `PipelineSchedule`."""

    cutting: Cutting
    output_merge_spec: Any
    scale_grads: bool
    seed: int
    tied_gradients: TiedGradients

    def alike(self) -> dict[str, object]:
        """What has to be the same on all ranks, by name."""
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
            of its size a microbatch and holder; ``reduced``: one sum a step, which rounds otherwise (about
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
        held = [stages] if isinstance(stages, Stage) else list(stages)
        if not held:
            raise ScheduleError("a rank needs at least one stage: pass the stage that it built")
        cutting = Cutting(n_microbatches, args_chunk_spec, kwargs_chunk_spec)
        self.options = ScheduleOptions(cutting, output_merge_spec, scale_grads, seed, tied_gradients)
        self.stages = {stage.index: stage for stage in held}
        self.tracer = tracer
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._actions = Actions(loss_fn=loss_fn or held[0].loss_fn)
        self._count = StepCount(*[max(stage.step_count.start for stage in held)] * 2)
        for stage in held:
            stage.step_count = self._count
        with doing("making a schedule"):
            self.comm: Comm = held[0].comm or ProcessGroupComm.from_group(held[0].group)
        with closed_on_error(self.comm, "making a schedule", _ALIKE) if self._owns_comm else nullcontext():
            self._join(held)

    def _join(self, held: Sequence[Stage]) -> None:
        """Agree with the other ranks on what is run, and connect to those that this one has to do with."""
        for stage in held:
            stage.by_mode = with_chains(stage.by_mode, self.options.tied_gradients == "exact")
            stage.follow(stage.by_mode.in_mode(stage.module.training))
        by_mode, count = held[0].by_mode, self.n_microbatches
        settings = {"the schedule": self.kind or type(self).__name__, **self.options.alike()}
        self.stage_ranks = agree_on_placement(self.comm, held, settings)
        self._check_given()
        self._actions.training = self._generate(self.kind) if self.kind else None
        self._tied = TiedParameters(self.comm, self.stages, self.stage_ranks)
        self._agreement = StepAgreement(self.comm, by_mode, self.stage_ranks, count)
        manual = {index: stage for index, stage in self.stages.items() if isinstance(stage, PipelineStage)}
        self._preparation: StepPreparation = (
            ShapeExchange(manual, self.comm, self.stage_ranks)
            if manual
            else CapturedPreparation(self.stages, self.comm, count)
        )
        pairs = rank_pairs(by_mode, self.stage_ranks)
        self.comm.connect({pair for a, b in sorted(pairs) for pair in ((a, b), (b, a))}, held[0].device)

    @property
    def n_microbatches(self) -> int:
        """Into how many a batch is cut."""
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
        """Of the random numbers."""
        return self.options.seed

    @property
    def tied_gradients(self) -> TiedGradients:
        """How the gradients of parameters in several stages come together."""
        return self.options.tied_gradients

    @property
    def routes(self) -> Routes:
        """What crosses in the mode that the stages were last run in."""
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
        """How many steps have been made: random numbers depend on it, so a resumed training needs it.
        `save_checkpoint` and `load_checkpoint` of the stages keep it without being asked.
        """
        return {"steps": self._count.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting where ``state`` stopped."""
        self._count.steps = state["steps"]

    def close(self) -> None:
        """Leave the pipeline: closes the communicator where the schedule made it. Done at exit if not
        called.
        """
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
        """Forward and backward of one batch; gradients are added to ``.grad``. Collective. In a schedule
        without ``loss_fn``, or without a backward pass, it is `eval`.

        A batch is given whole, and cut here, or as the microbatches that it is made of, which may be of sizes
        of their own. Each rank gives what it has in one of the two ways.

        Args:
            args: the model's arguments, on the rank that holds the first stage; ignored elsewhere.
            target: what ``loss_fn`` compares with, on the rank that holds the last stage.
            losses: gets the loss of each microbatch, on the rank that holds the last stage.
            loss_weights: what each microbatch's loss counts for, in place of its share of the batch, on the
                rank that holds the last stage: for a loss that is a mean over what a mask leaves. A plain
                sequence must sum to 1; `LossWeights` makes weights from counts, or takes another sum.
            return_outputs: False: the results are needed for the loss only; keeps none of them, which saves
                memory where they are large (the logits of a language model).
            loss_kwargs: what ``loss_fn`` is called with besides, whole for each microbatch, on the rank that
                holds the last stage.
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
        given = StepArguments(self.options.cutting, train, *batch, loss_weights, loss_kwargs or {})
        with nullcontext() if train else torch.no_grad():
            return self._run(given, losses, return_outputs=return_outputs)

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
        """Forward of one batch without gradients; touches no ``.grad``. Collective. Arguments are those of
        `step`.

        Modules stay in the mode that they are in: call ``stage.module.eval()`` first where that matters.
        ``losses`` is filled where there are a ``loss_fn`` and a target.
        """
        batch = args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs
        given = StepArguments(self.options.cutting, False, *batch, loss_keywords=loss_kwargs or {})
        with torch.no_grad():
            return self._run(given, losses, return_outputs=return_outputs)

    def _run(self, given: StepArguments, losses: list[Tensor] | None, *, return_outputs: bool) -> Any:
        what = f"{'step()' if given.train else 'eval()'} number {self._count.steps} of {type(self).__name__}"
        with doing(what):
            return self._run_step(given, losses, return_outputs=return_outputs)

    def _run_step(self, given: StepArguments, losses: list[Tensor] | None, *, return_outputs: bool) -> Any:
        with publish_errors(self.comm, "preparing a step"):
            self._check_stages()
            self._follow_modes()
            if given.train:
                self._ordered()
            # what this rank can find wrong by itself, before it waits for another
            last = self.routes.stages - 1 in self.stages
            loss_side = given.for_loss(last=last, scaled=self.options.scale_grads)
            accepted = self._preparation.accept(given)
            # what the ranks can find wrong together, before anything is computed
            symbols = len(self.routes.symbols)
            sizes = self._agreement.agree(self._announcement(given.train), accepted.sizes, symbols)
            prepared = self._preparation.prepare(replace(accepted, sizes=sizes))
            if prepared.changed:
                self._actions.recompile()
            inputs = self._inputs(given, accepted.made, loss_side, prepared, losses, return_outputs)
            executor = self._executor(given.train)
            if given.train:
                self._tied.begin(self.routes)
        with fresh_casts():
            results = executor.run(inputs, self.tracer)
        if given.train:
            with publish_errors(self.comm, "sharing the gradients of tied parameters"):
                self._tied.end(self.routes)
            self._count.steps += 1
        if losses is not None:
            losses[:] = results.losses
        return merge(results.outputs, self.options.output_merge_spec) if results.outputs else None

    def _announcement(self, train: bool) -> str:
        """What the others must be about to do too."""
        modes = {stage.module.training for stage in self.stages.values()}
        mode = "both modes" if len(modes) > 1 else "train mode" if modes.pop() else "eval mode"
        autocast = current_autocast(self._first.device.type)
        under = "" if autocast is None else f" under {autocast}"
        what = "step()" if train else "eval()" if self.loss_fn else "eval() or step() without loss_fn"
        name = self._actions.name if train else ""  # the others may have been given another
        return f"{what}{name} number {self._count.steps}{self._agreement.of_schedule} in {mode}{under}"

    def _check_stages(self) -> None:
        """A schedule made later may have changed what its stages send."""
        for index, stage in self.stages.items():
            tied_gradients = self.options.tied_gradients
            if any(group.chained != (tied_gradients == "exact") for group in stage.by_mode.tied):
                raise ScheduleError(
                    f"stage {index} was given to another schedule since, with other tied_gradients than "
                    f"{tied_gradients!r}, and follows that one: make both with the same, or give each "
                    "a stage of its own"
                )

    def _follow_modes(self) -> None:
        """Where a model takes another path in evaluation: let its stages take and make what they do in their
        mode.
        """
        if self._first.by_mode.evaluation is None:
            return
        if len({stage.module.training for stage in self.stages.values()}) > 1:
            raise SignatureMismatch(
                "this rank's stages are in both modes, but the model takes another path in each: call "
                "train() or eval() on all of them"
            )
        for stage in self.stages.values():
            routes = stage.by_mode.in_mode(stage.module.training)
            if routes is not stage.routes:
                stage.follow(routes)

    def _executor(self, train: bool) -> Executor:
        plain = self._ordered if train else partial(self._generate, "ForwardOnly")
        return self._actions.executor(plain, self.routes, self.stages, self.comm, train=train)

    def _ordered(self) -> Schedule:
        """What is run, without sends and receives where they have not been given."""
        if self._actions.training is None:
            raise ScheduleError(f"{type(self).__name__} has no actions yet: give it their order")
        return self._actions.training

    def _generate(self, kind: str) -> Schedule:
        """The schedule of that kind, without sends and receives."""
        stages = len(self.stage_ranks)
        return get_schedule(kind).generate(stages, self.n_microbatches, placement=self.stage_ranks)

    def _check_given(self) -> None:
        """Refuse what all ranks were given alike."""
        n_microbatches = self.n_microbatches
        if type(self) is PipelineSchedule:
            raise ScheduleError(
                "PipelineSchedule is the base of the schedules: use Schedule1F1B or ScheduleGPipe"
            )
        if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ScheduleError(f"n_microbatches is {n_microbatches!r}: give a whole number of at least 1")

    def _inputs(
        self,
        given: StepArguments,
        made: Microbatches | None,
        loss_side: LossSide,
        prepared: PreparedStep,
        losses: list[Tensor] | None,
        keep_outputs: bool,
    ) -> StepInputs:
        """What the step is given."""
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
            keep_outputs,
            given.loss_keywords,
            self._context(given, made, loss_side.targets, losses) if self._actions.functions else None,
        )

    def _context(
        self,
        given: StepArguments,
        made: Microbatches | None,
        targets: Sequence[Any] | None,
        losses: list[Tensor] | None,
    ) -> PipelineContext:
        """What custom functions are given in a step."""
        made = made or Microbatches.of(given.cut(first=0 in self.stages))
        args, kwargs = [part[0] for part in made.parts], [part[1] for part in made.parts]
        return PipelineContext(self, args, kwargs, None if targets is None else list(targets), losses)
