"""What a schedule runs: the actions of all ranks, in training and in evaluation, compiled when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from partita.errors import ArgumentError
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.running.custom_functions import CustomFunction, with_whole_stages
from partita.pipelining.steps.running.executor import Executor
from partita.pipelining.steps.running.messages import with_messages
from partita.planning import ActionKind, Schedule
from partita.runtime import Comm
from partita.runtime.same_settings import short_digest

__all__ = ["Actions"]


@dataclass
class Actions:
    """The actions of one schedule.

    Attributes:
        stages: those of this rank, by index.
        comm: what the ranks talk through.
        loss_fn: from (output, target) to a 0-d tensor; None to run forward only.
        training: with sends and receives only where the user gave them; None where there are no actions yet.
        from_user: whether the user gave ``training``, so that other ranks may have been given others.
        functions: what takes the place of a kind of action.
        defer_receives: post each right before the pass that needs its message.
    """

    stages: Mapping[int, Stage]
    comm: Comm
    loss_fn: Callable[..., Tensor] | None = None
    training: Schedule | None = None
    from_user: bool = False
    functions: dict[ActionKind, CustomFunction] = field(default_factory=dict)
    defer_receives: bool = False
    _executors: dict[tuple[bool, bool], Executor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ArgumentError(
                f"loss_fn is {self.loss_fn!r:.40}: give a function of (output, target) that returns the loss"
            )

    @property
    def forward_only(self) -> bool:
        """Whether a step has no backward pass."""
        return self.loss_fn is None or (self.training is not None and not self.training.has_backward)

    @property
    def name(self) -> str:
        """A name with a digest for actions that the user gave, for messages; empty for any others."""
        if not self.from_user or self.training is None:
            return ""
        return f" of {self.training.name} ({short_digest(self.training.to_csv(), 6)})"

    def replace(self, training: Schedule | None, *, from_user: bool) -> None:
        """Run these from now on."""
        self.training, self.from_user = training, from_user
        self.recompile()

    def recompile(self) -> None:
        """Compile again before the next step, since what is run or what crosses borders has changed."""
        self._executors.clear()

    def executor(self, generate: Callable[[], Schedule], *, train: bool) -> Executor:
        """What runs them on this rank, in the mode that its stages are in.

        Args:
            generate: returns the actions of all ranks, as ``training`` has them; called where they have not
                been compiled yet.
        """
        routes = next(iter(self.stages.values())).routes
        key = (train, routes is routes.in_mode(training=False))
        if key not in self._executors:
            schedule = generate()
            if train and self.functions:
                schedule = with_whole_stages(schedule, self.functions)
            self._executors[key] = Executor(
                with_messages(schedule, routes.edges),
                self.stages,
                self.comm,
                self.loss_fn,
                defer_receives=self.defer_receives or routes.bundled,
                functions=self.functions,
            )
        return self._executors[key]
