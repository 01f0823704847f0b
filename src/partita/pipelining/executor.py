"""Runs one rank's part of a schedule: compute in the order that the schedule says, receives posted ahead, sends that never wait.

Indices as in the papers: ``stage`` of the model, ``microbatch`` of the batch, ``rank`` of the process. One step is::

    for each action of this rank:   F  take inputs, run, hand on        RECV_*  make room, start receiving
                                    B  take gradients, run, hand back   SEND_*  start sending
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partita.errors import ExecutionError, PartitaError
from partita.pipelining.routes import Routes
from partita.pipelining.stage import PipelineStage, detached
from partita.planning import Action, ActionKind, Schedule
from partita.runtime import Comm, Handle, RandomKey, Recorder, keyed

__all__ = ["Executor", "StepInputs"]

_MESSAGES_AHEAD = 64
"""How many sends may be unfinished before the oldest is waited for; it is long done then as a rule."""


class StepInputs:
    """What one step is given, cut into microbatches.

    Args:
        arguments: for each microbatch the tensors among the model's inputs, by name; None on ranks without the first stage.
        targets: for each microbatch; None where there are none.
        weights: what each microbatch's loss counts for.
    """

    def __init__(self, arguments: Sequence[Mapping[str, Tensor]] | None, targets: Sequence[Any] | None, weights: Sequence[float]) -> None:
        self.arguments = arguments
        self.targets = targets
        self.weights = tuple(weights)


class Executor:
    """One rank of a pipeline.

    Args:
        schedule: with sends and receives written out.
        stages: those of this rank, by index.
        loss_fn: from (output, target) to a 0-d tensor; None to run forward only.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, PipelineStage],
        comm: Comm,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        tracer: Recorder,
    ) -> None:
        self.schedule = schedule
        self.stages = dict(stages)
        self.comm = comm
        self.loss_fn = loss_fn
        self.tracer = tracer
        self.train = schedule.has_backward
        self.routes: Routes = next(iter(self.stages.values())).routes
        self.program = _receives_first(schedule.actions(comm.rank))
        self._verbs: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.SEND_F: self._send_forward,
            ActionKind.RECV_F: self._receive_forward,
            ActionKind.SEND_B: self._send_backward,
            ActionKind.RECV_B: self._receive_backward,
        }
        unknown = {action.kind for action in self.program} - self._verbs.keys()
        if unknown:
            raise ExecutionError(f"schedule {schedule.name!r} has {sorted(unknown)}, which this executor does not run: use GPipe or 1F1B")
        self._clear()

    def run(self, step: StepInputs, *, seed: int, number: int) -> tuple[list[Any], list[Tensor]]:
        """Run one step.

        Args:
            seed: of the random numbers.
            number: which step it is; random numbers differ from step to step.

        Returns:
            The results and the losses of all microbatches, in order; empty lists on ranks without the last stage.

        Raises:
            PartitaError: whatever went wrong here is published to the other ranks first.
        """
        self._step, self._seed, self._number = step, seed, number
        results = self._results
        losses = self._losses
        action: Action | None = None
        try:
            for action in self.program:
                with self.tracer.span(str(action), _category(action), stage=action.stage, microbatch=action.microbatch):
                    self._verbs[action.kind](action)
            self._finish_sends(0)
        except BaseException as error:
            for stage in self.stages.values():
                stage.forget()
            where = f"stage {action.stage}, microbatch {action.microbatch}, action {action}" if action is not None else "a step"
            self.comm.fail(error, where)
            if isinstance(error, Exception) and not isinstance(error, PartitaError):
                error.add_note(f"(rank {self.comm.rank}, {where})")
            raise
        finally:
            self._clear()
        return [results[key] for key in sorted(results)], [losses[key][0] for key in sorted(losses)]

    def _clear(self) -> None:
        self._inputs: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._gradients: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._made: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._given_back: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._awaited: dict[tuple[str, int, int], list[Handle]] = {}
        self._sends: deque[Handle] = deque()
        self._sent: dict[tuple[ActionKind, int, int], set[int]] = {}
        self._results: dict[int, Any] = {}
        self._losses: dict[int, tuple[Tensor, Tensor]] = {}

    # Compute.

    def _forward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], _number_of(action)
        self._wait("F", stage.index, microbatch)
        values = self._inputs.pop((stage.index, microbatch), {})
        if stage.is_first:
            assert self._step.arguments is not None
            values |= self._step.arguments[microbatch]
        with torch.set_grad_enabled(self.train), keyed(RandomKey(self._seed, self._number, microbatch)):
            outputs = stage.forward(microbatch, values, train=self.train)
        made = values | outputs
        if stage.is_last:
            self._finish(microbatch, made | (stage.passed_on(microbatch) if self.train else {}))
        self._made[stage.index, microbatch] = made
        for (producer, consumer), names in self.routes.forward.items():
            if producer == stage.index and consumer in self.stages:
                self._inputs.setdefault((consumer, microbatch), {}).update((name, made[name].detach()) for name in names)
        if not self._sends_forward(stage.index):
            del self._made[stage.index, microbatch]

    def _backward(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], _number_of(action)
        self._wait("B", stage.index, microbatch)
        gradients = self._gradients.pop((stage.index, microbatch), {})
        loss = self._losses.get(microbatch) if stage.is_last else None
        results = stage.backward(microbatch, gradients, loss)
        if loss is not None:
            self._losses[microbatch] = (loss[0].detach(), loss[1])
        for (sender, receiver), names in self.routes.backward.items():
            if sender == stage.index and receiver in self.stages:
                self._gradients.setdefault((receiver, microbatch), {}).update((name, results[name]) for name in names)
        if any(sender == stage.index and receiver not in self.stages for sender, receiver in self.routes.backward):
            self._given_back[stage.index, microbatch] = results

    def _finish(self, microbatch: int, made: Mapping[str, Tensor]) -> None:
        """The model's result, and its loss, for one microbatch."""
        last = self.stages[self.routes.stages - 1]
        output = last.assemble(made)
        if self.loss_fn is not None and (self.train or self._step.targets is not None):
            target = self._step.targets[microbatch] if self._step.targets is not None else None
            loss = self.loss_fn(output, target)
            if loss.dim() != 0:
                raise ExecutionError(
                    f"loss_fn returns a tensor of shape {list(loss.shape)}: return one number, such as its mean()"
                )
            self._losses[microbatch] = (loss, torch.full_like(loss, self._step.weights[microbatch]))
        self._results[microbatch] = detached(output)

    # Communication.

    def _receive_forward(self, action: Action) -> None:
        self._receive("F", action, self.routes.forward.get((action.other_stage, action.stage), ()), self._inputs)

    def _receive_backward(self, action: Action) -> None:
        self._receive("B", action, self.routes.backward.get((action.other_stage, action.stage), ()), self._gradients)

    def _send_forward(self, action: Action) -> None:
        names = self.routes.forward.get((action.stage, action.other_stage), ())
        self._send(action, names, self._made)

    def _send_backward(self, action: Action) -> None:
        names = self.routes.backward.get((action.stage, action.other_stage), ())
        self._send(action, names, self._given_back)

    def _receive(
        self, what: str, action: Action, names: Sequence[str], into: dict[tuple[int, int], dict[str, Tensor]]
    ) -> None:
        microbatch, device = _number_of(action), self.stages[action.stage].device
        for name in names:
            value = self.routes.values[name]
            buffer = torch.empty(value.shape, dtype=value.dtype, device=device)
            tag = self._tag(name, action.other_stage, action.stage, microbatch)
            handle = self.comm.recv(buffer, self.schedule.stage_ranks[action.other_stage], tag)
            into.setdefault((action.stage, microbatch), {})[name] = buffer
            self._awaited.setdefault((what, action.stage, microbatch), []).append(handle)

    def _send(self, action: Action, names: Sequence[str], source: dict[tuple[int, int], dict[str, Tensor]]) -> None:
        microbatch = _number_of(action)
        values = source.get((action.stage, microbatch), {})
        for name in names:
            tag = self._tag(name, action.stage, action.other_stage, microbatch)
            self._sends.append(
                self.comm.send(values[name].detach(), self.schedule.stage_ranks[action.other_stage], tag)
            )
        if self._is_last_send(action):
            source.pop((action.stage, microbatch), None)
        self._finish_sends(_MESSAGES_AHEAD)

    def _tag(self, name: str, start: int, to: int, microbatch: int) -> int:
        return 1 + self.routes.tags[name, start, to] * self.schedule.microbatches + microbatch

    def _wait(self, what: str, stage: int, microbatch: int) -> None:
        handles = self._awaited.pop((what, stage, microbatch), ())
        if not handles:
            return
        with self.tracer.span(f"wait {stage}{what}{microbatch}", "wait", stage=stage, microbatch=microbatch):
            for handle in handles:
                handle.wait()

    def _finish_sends(self, leave: int) -> None:
        while len(self._sends) > leave:
            self._sends.popleft().wait()

    def _sends_forward(self, stage: int) -> bool:
        return any(producer == stage and consumer not in self.stages for producer, consumer in self.routes.forward)

    def _is_last_send(self, action: Action) -> bool:
        """Whether no later send of the same pass needs the values any more (sends follow in order of the other stage)."""
        routes = self.routes.forward if action.kind is ActionKind.SEND_F else self.routes.backward
        others = [end for start, end in routes if start == action.stage and end not in self.stages]
        sent = self._sent.setdefault((action.kind, action.stage, _number_of(action)), set())
        sent.add(action.other_stage)
        if sent.issuperset(others):
            del self._sent[action.kind, action.stage, _number_of(action)]
            return True
        return False


def _receives_first(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Post each receive one compute action earlier, so that its message travels while that action runs."""
    program: list[Action] = []
    for action in actions:
        if action.is_receive:
            at = len(program)
            while at and not program[at - 1].is_receive and not program[at - 1].is_compute:
                at -= 1
            if at and program[at - 1].is_compute:
                at -= 1
            program.insert(at, action)
        else:
            program.append(action)
    return tuple(program)


def _number_of(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _category(action: Action) -> str:
    return "compute" if action.is_compute else "comm"

