"""What a schedule runs: the actions of all ranks, in training and in evaluation, compiled when needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.custom_functions import CustomFunction, with_whole_stages
from partita.pipelining.steps.executor import Executor
from partita.pipelining.steps.messages import with_messages
from partita.planning import ActionKind, Schedule
from partita.runtime import Comm
from partita.runtime.same_settings import short_digest

__all__ = ["Actions"]


@dataclass
class Actions:
    """The actions of one schedule.

    Attributes:
        training: without sends and receives where they have not been given; None where there are none yet.
        given: whether they were given by the user, so that other ranks may have been given others.
        functions: what takes the place of a kind of action.
        defer_receives: post each right before the pass that needs its message.
        loss_fn: from (output, target) to a 0-d tensor; None to run forward only.
    """

    training: Schedule | None = None
    given: bool = False
    functions: dict[ActionKind, CustomFunction] = field(default_factory=dict)
    defer_receives: bool = False
    loss_fn: Callable[..., Tensor] | None = None
    _executors: dict[tuple[bool, bool], Executor] = field(default_factory=dict)

    @property
    def forward_only(self) -> bool:
        """Whether a step has no backward pass."""
        return self.loss_fn is None or (self.training is not None and not self.training.has_backward)

    @property
    def name(self) -> str:
        """Of actions that the user gave, with a number that tells them from others; else empty."""
        if not self.given or self.training is None:
            return ""
        return f" of {self.training.name} ({short_digest(self.training.to_csv(), 6)})"

    def change(self, training: Schedule | None, *, given: bool) -> None:
        """Run these from now on."""
        self.training, self.given = training, given
        self.recompile()

    def recompile(self) -> None:
        """What is run, or what crosses, has changed."""
        self._executors.clear()

    def executor(
        self,
        plain: Callable[[], Schedule],
        routes: Routes,
        stages: Mapping[int, Stage],
        comm: Comm,
        *,
        train: bool,
    ) -> Executor:
        """What runs them on this rank.

        Args:
            plain: makes those of all ranks, without sends and receives where they have not been given.
            routes: of the mode that the stages are in.
        """
        key = (train, routes is routes.in_mode(training=False))
        if key not in self._executors:
            schedule = plain()
            if train and self.functions:
                schedule = with_whole_stages(schedule, self.functions)
            self._executors[key] = Executor(
                with_messages(schedule, routes.edges),
                stages,
                comm,
                self.loss_fn,
                defer_receives=self.defer_receives or routes.bundled,
                functions=self.functions,
            )
        return self._executors[key]
