"""What is under way between stages during one step: values forwards, gradients backwards.

What a pass makes is put here once, and goes to each stage that takes it: at once where that stage is on this
rank, with the schedule's SEND otherwise. Nothing is kept once everybody has got it::

    put(F, 0, mb)  ->  inbox of stage 1 (this rank)
                   ->  outbox for stage 3  -- SEND_F -->  (network)  -- RECV_F -->  inbox of stage 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from partita.pipelining.routes import MASK, Routes
from partita.pipelining.stage import PipelineStage
from partita.planning import Action, ActionKind, Schedule
from partita.runtime import Comm, Handle, Recorder

__all__ = ["Mailbox"]

_UNFINISHED = 64
"""How many sends may be unfinished before the oldest is waited for; it is long done then as a rule."""

_F, _B = ActionKind.F, ActionKind.B
_PASS = {ActionKind.SEND_F: _F, ActionKind.RECV_F: _F, ActionKind.SEND_B: _B, ActionKind.RECV_B: _B}
"""The pass whose results an action carries."""

_Key = tuple[ActionKind, int, int]
"""Pass, stage, microbatch."""


class Mailbox:
    """One rank's, for one step. Keys: the pass (F or B), a stage of this rank, a microbatch."""

    def __init__(self, schedule: Schedule, routes: Routes, stages: Mapping[int, PipelineStage], comm: Comm):
        self._ranks = schedule.stage_ranks
        self._microbatches = schedule.microbatches
        self._routes = routes
        self._stages = stages
        self._comm = comm
        self._inbox: dict[_Key, dict[str, Tensor]] = {}
        self._awaited: dict[_Key, list[Handle]] = {}
        self._masks: dict[_Key, list[tuple[Sequence[str], Tensor]]] = {}
        self._outbox: dict[tuple[ActionKind, int, int, int], dict[str, Tensor]] = {}
        self._sends: deque[Handle] = deque()

    def put(self, kind: ActionKind, stage: int, microbatch: int, values: Mapping[str, Tensor | None]) -> None:
        """Hand on what ``stage`` made in a pass; None for a gradient that is not there."""
        for (start, to), names in self._links(kind).items():
            if start != stage:
                continue
            chosen = {name: value.detach() for name in names if (value := values[name]) is not None}
            if to in self._stages:
                self._inbox.setdefault((kind, to, microbatch), {}).update(chosen)
            else:
                self._outbox[kind, stage, to, microbatch] = self._filled(kind, stage, names, chosen)

    def take(self, kind: ActionKind, stage: int, microbatch: int, tracer: Recorder) -> dict[str, Tensor]:
        """What ``stage`` needs for a pass; waits until all of it is here."""
        key = (kind, stage, microbatch)
        handles = self._awaited.pop(key, ())
        if handles:
            with tracer.span(f"wait {stage}{kind}{microbatch}", "wait", stage=stage, microbatch=microbatch):
                _wait(handles)
        values = self._inbox.pop(key, {})
        for names, mask in self._masks.pop(key, ()):
            for name, there in zip(names, mask.tolist(), strict=True):
                if not there:
                    del values[name]
        return values

    def send(self, action: Action, microbatch: int) -> None:
        """Start sending what a SEND action names."""
        kind, to = _PASS[action.kind], action.other_stage
        for name, value in self._outbox.pop((kind, action.stage, to, microbatch), {}).items():
            tag = self._tag(name, action.stage, to, microbatch)
            self._sends.append(self._comm.send(value, self._ranks[to], tag))
        while len(self._sends) > _UNFINISHED:
            self._sends.popleft().wait()

    def receive(self, action: Action, microbatch: int) -> None:
        """Make room for what a RECV action names, and start receiving."""
        kind, start, stage = _PASS[action.kind], action.other_stage, action.stage
        key, device = (kind, stage, microbatch), self._stages[stage].device
        names = self._links(kind).get((start, stage), ())
        buffers = {name: self._room(name, device) for name in names}
        self._inbox.setdefault(key, {}).update(buffers)
        if names and kind is _B and self._routes.masked:
            mask = torch.empty(len(names), dtype=torch.bool, device=device)
            self._masks.setdefault(key, []).append((names, mask))
            buffers = {MASK: mask, **buffers}
        for name, buffer in buffers.items():
            handle = self._comm.recv(buffer, self._ranks[start], self._tag(name, start, stage, microbatch))
            self._awaited.setdefault(key, []).append(handle)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        _wait(self._sends)
        self._sends.clear()

    def _room(self, name: str, device: torch.device) -> Tensor:
        value = self._routes.values[name]
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    def _filled(
        self, kind: ActionKind, stage: int, names: Sequence[str], values: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """A message has all of its names: zeros stand for what is not there, and a mask says so."""
        device = self._stages[stage].device
        whole = {name: values[name] if name in values else self._room(name, device).zero_() for name in names}
        if kind is _F or not self._routes.masked:
            return whole
        return {MASK: torch.tensor([name in values for name in names], device=device), **whole}

    def _links(self, kind: ActionKind) -> Mapping[tuple[int, int], tuple[str, ...]]:
        return self._routes.forward if kind is _F else self._routes.backward

    def _tag(self, name: str, start: int, to: int, microbatch: int) -> int:
        # 0 is taken by the agreement before a step.
        return 1 + self._routes.tags[name, start, to] * self._microbatches + microbatch


def _wait(handles: Sequence[Handle] | deque[Handle]) -> None:
    for handle in handles:
        handle.wait()
