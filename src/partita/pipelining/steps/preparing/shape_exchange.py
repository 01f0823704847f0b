"""What crosses each border in a step of stages of the user's own modules, sent from stage to stage.

Each stage receives a description of its inputs, infers what it will return, and describes that to the next::

    stage 0   infers  -- number [, description] -->   stage 1   infers  -- ... -->   stage 2

A description that was sent before is sent as its number alone, so a step like one before costs one small
message a border, which travels ahead of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from partita.errors import SignatureMismatch
from partita.pipelining.interface.routes import TRAILER, Routes, StageBorder
from partita.pipelining.interface.values import Value
from partita.pipelining.stages.own_modules.crossing import Crossing, output_name
from partita.pipelining.stages.own_modules.manual import MOST_VALUES, PipelineStage, tag_of
from partita.pipelining.steps.preparing.arguments import StepArguments
from partita.pipelining.steps.preparing.preparation import Accepted, PreparedStep
from partita.runtime import Comm

__all__ = ["ShapeExchange"]

_TAG = 0
"""The same as that of the agreement before a step: messages of one tag arrive in order."""

_KEPT = 64
"""How many descriptions both sides of a border remember."""

Sent = tuple[tuple[int, ...], tuple[bytes, ...]]
"""The samples of each microbatch, and the description of what is sent for each."""


K = TypeVar("K")


class _Numbered(Generic[K]):
    """A table that numbers its keys and drops the oldest of many; equal at both ends of a border."""

    def __init__(self) -> None:
        self.entries: dict[Any, K] = {}
        self.count = 0

    def add(self, key: Any, value: K) -> None:
        if len(self.entries) >= _KEPT:
            del self.entries[next(iter(self.entries))]
        self.entries[key] = value
        self.count += 1


class ShapeExchange:
    """The `StepPreparation` of stages of the user's own modules.

    Args:
        stages: those of this rank, by index.
        stage_ranks: the rank of each stage.
    """

    def __init__(self, stages: Mapping[int, PipelineStage], comm: Comm, stage_ranks: Sequence[int]) -> None:
        self._stages = {index: stages[index] for index in sorted(stages)}
        self._comm = comm
        self._ranks = stage_ranks
        self._names: Any = None
        self._sent: dict[int, _Numbered[int]] = {index: _Numbered() for index in stages}
        self._received: dict[int, _Numbered[Sent]] = {index: _Numbered() for index in stages}

    def accept(self, arguments: StepArguments) -> Accepted:
        """See `StepPreparation`.

        Raises:
            ExecutionError: shapes for which the first stage fails, or can't be found without data, or a
                result that can't be sent.
        """
        first = self._stages.get(0)
        batch = arguments.in_microbatches(first=first is not None)
        if first is None:
            return Accepted(microbatches=replace(batch, samples=()))
        if first.bind is not None:
            batch = replace(batch, parts=tuple((first.bind(*part), part[1]) for part in batch.parts))
        if not first.is_last:  # it remembers what it infers here
            for positional, named in batch.parts:
                incoming = Crossing.of(positional, "args")
                outgoing, _ = first.outgoing(incoming, named if first.bind is None else {})
                if 1 not in self._stages:
                    _ = outgoing.data  # raises if it can't be sent
        return Accepted(microbatches=batch)

    def prepare(self, accepted: Accepted) -> PreparedStep:
        """See `StepPreparation`.

        Raises:
            SignatureMismatch: microbatches for which a stage returns other structures, not only other shapes.
            ExecutionError: shapes that can't be found without data.
        """
        assert accepted.microbatches is not None
        batch = accepted.microbatches
        samples = batch.samples
        incoming: dict[int, list[Crossing]] = {}
        outgoing: dict[int, list[Crossing]] = {}
        written: dict[int, frozenset[str]] = {}
        keywords: dict[int, list[dict[str, Any]]] = {}
        for index, stage in self._stages.items():
            # what comes in: from the user, from a stage of this rank, or from another rank
            keywords[index] = [named if stage.bind is None else {} for _, named in batch.parts]
            if index == 0:
                incoming[index] = [Crossing.of(positional, "args") for positional, _ in batch.parts]
            elif index - 1 in self._stages:
                incoming[index] = outgoing[index - 1]
            else:
                samples, descriptions = self._receive(index)
                incoming[index] = [Crossing.read(data, output_name(index - 1)) for data in descriptions]
            # what goes out
            if not stage.is_last:
                outputs = [
                    stage.outgoing(crossing, named)
                    for crossing, named in zip(incoming[index], keywords[index], strict=True)
                ]
                outgoing[index] = [crossing for crossing, _ in outputs]
                written[index] = _written(incoming[index][0], outputs[0][1])
                _check_alike(index, outgoing[index])
                if index + 1 not in self._stages:
                    self._send(index, (samples, tuple(crossing.data for crossing in outgoing[index])))
            else:
                # its result is never inferred, so it may write to any of its inputs
                written[index] = frozenset(value.name for value in incoming[index][0].values)
        # the routes of each microbatch, as far as this rank needs them
        crossing = tuple(
            self._routes(number, incoming, outgoing, written) for number in range(len(batch.parts))
        )
        names = (crossing[0].borders, crossing[0].forward, crossing[0].backward)
        changed, self._names = names != self._names, names
        for index, stage in self._stages.items():
            stage.prepare(incoming[index], outgoing.get(index, ()), keywords[index], crossing)
        arguments = None
        if 0 in self._stages:
            arguments = [
                _named(crossing, positional)
                for crossing, (positional, _) in zip(incoming[0], batch.parts, strict=True)
            ]
        return PreparedStep(arguments, samples, crossing, changed)

    def _send(self, index: int, description: Sent) -> None:
        sent, peer = self._sent[index], self._ranks[index + 1]
        number = sent.entries.get(description, sent.count)
        self._comm.send(torch.tensor([number], dtype=torch.int64), peer, _TAG).wait()
        if description not in sent.entries:
            sent.add(description, number)
            self._comm.send_object(description, peer)

    def _receive(self, index: int) -> Sent:
        received, peer = self._received[index], self._ranks[index - 1]
        buffer = torch.empty(1, dtype=torch.int64)
        self._comm.recv(buffer, peer, _TAG).wait()
        number = int(buffer)
        if number not in received.entries:
            received.add(number, self._comm.recv_object(peer))
        return received.entries[number]

    def _routes(
        self,
        microbatch: int,
        incoming: Mapping[int, Sequence[Crossing]],
        outgoing: Mapping[int, Sequence[Crossing]],
        written: Mapping[int, frozenset[str]],
    ) -> Routes:
        draft = next(iter(self._stages.values())).by_mode
        borders, values = list(draft.borders), dict(draft.values)
        forward, backward, tags = dict(draft.forward), dict(draft.backward), dict(draft.tags)
        for index in self._stages:
            taken = incoming[index][microbatch].values
            handed_on = outgoing[index][microbatch].values if index in outgoing else ()
            borders[index] = StageBorder(
                tuple(value.name for value in taken), tuple(value.name for value in handed_on), written[index]
            )
            for start, crossing in ((index - 1, taken), (index, handed_on)):
                if start < 0 or start + 1 >= len(self._ranks):
                    continue
                names = tuple(value.name for value in crossing)
                values.update({value.name: value for value in crossing})
                forward[start, start + 1] = names
                trained = tuple(value.name for value in crossing if value.requires_grad)
                backward[start + 1, start] = (*draft.backward.get((start + 1, start), ()), *trained)
                for number, name in enumerate((TRAILER, *names)):
                    tags[name, start, start + 1] = tag_of(start, start + 1, number)
                    tags[name, start + 1, start] = tag_of(start + 1, start, number)
        inputs = tuple(incoming[0][microbatch].values) if 0 in self._stages else ()
        return Routes(tuple(borders), values, forward, backward, inputs, (), draft.tied, tags=tags)


def _named(crossing: Crossing, value: Any) -> dict[str, Tensor]:
    """The tensors of a value, by the names in its description."""
    tensors = crossing.tensors(value, "step()")
    return {wanted.name: tensor for wanted, tensor in zip(crossing.values, tensors, strict=True)}


def _written(incoming: Crossing, written: Sequence[bool]) -> frozenset[str]:
    """The names of the inputs that the stage writes to."""
    leaves = incoming.leaves
    return frozenset(
        leaf.name for leaf, does in zip(leaves, written, strict=False) if does and isinstance(leaf, Value)
    )


def _check_alike(index: int, outgoing: Sequence[Crossing]) -> None:
    first = outgoing[0]
    if len(first.values) >= MOST_VALUES:
        raise SignatureMismatch(
            f"stage {index} returns {len(first.values)} tensors: return fewer than {MOST_VALUES}, or one "
            "that holds them"
        )
    for microbatch, other in enumerate(outgoing):
        alike = [value.name for value in other.values] == [value.name for value in first.values]
        if not alike or other.spec != first.spec:
            raise SignatureMismatch(
                f"stage {index} returns {other.spec} for microbatch {microbatch} and {first.spec} for "
                "microbatch 0: return the same structure for all microbatches of a step"
            )
