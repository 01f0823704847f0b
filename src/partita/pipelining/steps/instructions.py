"""What a rank does in a step, one small object an action, with all that can be known before looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from partita._torch.autograd.engine import hooks_made
from partita.errors import ExecutionError, PartitaError, SignatureMismatch
from partita.pipelining.blocks.transfer import receive_bundle, send_bundle
from partita.pipelining.interface.layout import empty_trailer, packed, trailer_of
from partita.pipelining.interface.routes import Value
from partita.pipelining.stages.flight import detached
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.mailbox import Delivery, Inbox, Outbox
from partita.pipelining.steps.step import StepState
from partita.planning import Action
from partita.runtime import Comm, Handle, finish_all, keyed, wait_all

__all__ = [
    "Backward",
    "Forward",
    "InputBackward",
    "Instruction",
    "Message",
    "Receive",
    "Send",
    "StageCall",
    "WeightBackward",
]

LossFunction = Callable[..., Tensor]


class Instruction(Protocol):
    """One action, ready to run.

    Attributes:
        action: for messages and traces.
        inbox: what it waits for first; None where it waits for nothing.
    """

    action: Action
    inbox: Inbox | None

    def run(self) -> None:
        """Do it."""
        ...


class Forward:
    """F."""

    __slots__ = ("_delivery", "_loss_fn", "_microbatch", "_stage", "_step", "_train", "action", "inbox")

    def __init__(
        self,
        action: Action,
        microbatch: int,
        stage: Stage,
        step: StepState,
        inbox: Inbox,
        delivery: Delivery,
        *,
        loss_fn: LossFunction | None,
        train: bool,
    ) -> None:
        self.action = action
        self.inbox: Inbox | None = inbox
        self._microbatch = microbatch
        self._stage = stage
        self._step = step
        self._delivery = delivery
        self._loss_fn = loss_fn
        self._train = train

    def run(self) -> None:
        step, stage, microbatch = self._step, self._stage, self._microbatch
        assert self.inbox is not None
        values = self.inbox.take()
        if stage.is_first and step.inputs.arguments is not None:
            values.update(step.inputs.arguments[microbatch])
        with keyed(step.key(microbatch)):
            made = stage.forward(microbatch, values, train=self._train)
        if values:
            made = values | made
        if stage.is_last:
            self._finish()
        self._delivery.put(made)

    def _finish(self) -> None:
        """The model's result, and its loss."""
        step, microbatch = self._step, self._microbatch
        output = self._stage.assemble()
        if step.inputs.keep_outputs:
            step.outputs[microbatch] = detached(output)
        targets = step.inputs.targets
        if self._loss_fn is None or not (self._train or targets):
            return
        before = hooks_made()
        target = targets[microbatch] if targets else None
        loss = _checked(_loss_of(self._loss_fn, output, target, step.inputs.loss_kwargs))
        # A copy: what a reduction returns may lie in memory as large as what was reduced (mse_loss).
        step.losses[microbatch] = loss.detach().clone()
        if self._train:
            seed = step.seed(microbatch, loss)
            self._stage.start_from(microbatch, loss, seed, hooked=hooks_made() != before)


class Backward:
    """B."""

    __slots__ = ("_backward", "_delivery", "_microbatch", "_step", "action", "inbox")

    def __init__(
        self,
        action: Action,
        microbatch: int,
        stage: Stage,
        step: StepState,
        inbox: Inbox,
        delivery: Delivery,
    ) -> None:
        self.action = action
        self.inbox: Inbox | None = inbox
        self._microbatch = microbatch
        self._step = step
        self._delivery = delivery
        self._backward = self._of(stage)

    def _of(self, stage: Stage) -> Callable[[int, dict[str, Tensor]], dict[str, Tensor | None]]:
        return stage.backward

    def run(self) -> None:
        assert self.inbox is not None
        gradients = self.inbox.take()
        with keyed(self._step.key(self._microbatch), backward=True):
            results = self._backward(self._microbatch, gradients)
        self._delivery.put(results)


class InputBackward(Backward):
    """I."""

    __slots__ = ()

    def _of(self, stage: Stage) -> Callable[[int, dict[str, Tensor]], dict[str, Tensor | None]]:
        return stage.backward_input


class WeightBackward:
    """W."""

    __slots__ = ("_microbatch", "_stage", "_step", "action", "inbox")

    def __init__(self, action: Action, microbatch: int, stage: Stage, step: StepState) -> None:
        self.action = action
        self.inbox: Inbox | None = None
        self._microbatch = microbatch
        self._stage = stage
        self._step = step

    def run(self) -> None:
        with keyed(self._step.key(self._microbatch), backward=True):
            self._stage.backward_weight(self._microbatch)


@dataclass(frozen=True, slots=True)
class Message:
    """What goes from one rank to another for one microbatch.

    Attributes:
        rank: the other one.
        values: what the message is made of, each with its tag.
        trailer_tag: of what is sent after them.
    """

    action: Action
    microbatch: int
    step: StepState
    comm: Comm
    rank: int
    values: Sequence[tuple[Value, int]]
    trailer_tag: int


class _Transfer:
    """What sending and receiving have in common: the message, laid out for the step."""

    __slots__ = ("_comm", "_microbatch", "_rank", "_step", "_trailer_tag", "_values", "action", "inbox")

    def __init__(self, message: Message) -> None:
        self.action = message.action
        self.inbox: Inbox | None = None
        self._microbatch = message.microbatch
        self._step = message.step
        self._comm = message.comm
        self._rank = message.rank
        self._values = tuple((value.name, value, tag) for value, tag in message.values)
        self._trailer_tag = message.trailer_tag


class Send(_Transfer):
    """SEND_F or SEND_B: starts sending, and leaves.

    Attributes:
        answered: earlier sends that are let go of first (see ``partita.planning.SendEnds``).
        unanswered: earlier sends that are waited for first (see there).
        handles: of what is under way.
    """

    __slots__ = ("_outbox", "answered", "handles", "unanswered")

    def __init__(self, message: Message, outbox: Outbox) -> None:
        """``outbox``: where the values wait."""
        super().__init__(message)
        self.answered: tuple[Send, ...] = ()
        self.unanswered: tuple[Send, ...] = ()
        self._outbox = outbox
        self.handles: list[Handle] = []

    def run(self) -> None:
        for earlier in self.answered:
            finish_all(earlier.handles)
            earlier.clear()
        for earlier in self.unanswered:
            wait_all(earlier.handles)
            earlier.clear()
        outbox, send, rank, sends = self._outbox, self._comm.send, self._rank, self.handles
        values, data, tags = [], [], []
        for name, value, tag in self._values:
            tensor = outbox.get(name)
            if value.bundle:
                sends += send_bundle(self._comm, outbox[name], rank, tag)
                continue
            values.append(tensor)
            data.append(self._blank(value) if tensor is None else packed(tensor))
            tags.append(tag)
        if tags:
            for numbers, tag in zip(data, tags, strict=True):
                sends.append(send(numbers, rank, tag))
            sends.append(send(trailer_of(values, data), rank, self._trailer_tag))
        outbox.clear()

    def _blank(self, value: Value) -> Tensor:
        """A message has all of its values: zeros stand for what is not there."""
        return self._step.empty_like_value(self.action.stage, self._microbatch, value).zero_()

    def clear(self) -> None:
        """Let its memory go: it has left, or there was a failure."""
        self.handles.clear()


class _Arrival:
    """The handle of a message: of its numbers, and of the trailer, which has been sent after them.

    The numbers are here when the trailer is. That is short, and so arrives whole or not at all: only of such
    messages gloo tells for certain when their connection ends (see ``partita.runtime.waiters``).
    """

    __slots__ = ("_numbers", "_trailer")

    def __init__(self, numbers: list[Handle], trailer: Handle) -> None:
        self._numbers = numbers
        self._trailer = trailer

    def wait(self) -> None:
        self._trailer.wait()
        finish_all(self._numbers)


class Receive(_Transfer):
    """RECV_F or RECV_B: makes room, and starts receiving.

    Room is made when the receive is posted and belongs to whoever takes the value: autograd keeps some of it
    for the backward pass. So it is never used for another microbatch; torch's allocator has it back when its
    last user lets go. The trailer is read and done with.
    """

    __slots__ = ("_bundles", "_names", "_tensors", "_to")

    def __init__(self, message: Message, to: Inbox) -> None:
        """``to``: who takes it."""
        super().__init__(message)
        self._to = to
        self._bundles = [(name, tag) for name, value, tag in self._values if value.bundle]
        self._tensors = [(value, tag) for _, value, tag in self._values if not value.bundle]
        self._names = [value.name for value, _ in self._tensors]

    def run(self) -> None:
        handles, receive, rank, stage = self._to.handles, self._comm.recv, self._rank, self.action.stage
        empty, microbatch = self._step.empty_like_value, self._microbatch
        for name, tag in self._bundles:
            self._to.values[name] = receive_bundle(self._comm, rank, tag, self._step.devices[stage], handles)
        if not self._tensors:
            return
        data = [empty(stage, microbatch, value) for value, _ in self._tensors]
        numbers = [receive(to, rank, tag) for (_, tag), to in zip(self._tensors, data, strict=True)]
        trailer = empty_trailer(data)
        self._to.messages.append((self._names, trailer, data))
        handles.append(_Arrival(numbers, receive(trailer, rank, self._trailer_tag)))


class StageCall:
    """UNSHARD, RESHARD or REDUCE_GRAD: whatever the stage has for it."""

    __slots__ = ("_stage", "action", "inbox")

    def __init__(self, action: Action, stage: Stage) -> None:
        self.action = action
        self.inbox: Inbox | None = None
        self._stage = stage

    def run(self) -> None:
        hook = self._stage.hooks.get(self.action.kind)
        if hook is not None:
            hook()


def _loss_of(loss_fn: Callable[..., Tensor], output: Any, target: Any, keywords: Mapping[str, Any]) -> Tensor:
    """Where it fails over tensors of different sizes, the error says which."""
    try:
        return loss_fn(output, target, **keywords)
    except (RuntimeError, ValueError) as error:
        is_about_sizes = "size" in str(error) or "shape" in str(error)
        if isinstance(error, PartitaError) or not is_about_sizes or not _differ(output, target):
            raise
        raise SignatureMismatch(
            f"loss_fn fails on a microbatch's output of shape {list(output.shape)} and its target of shape "
            f"{list(target.shape)}: {error}. Give targets of the batch's size"
        ) from error


def _differ(output: Any, target: Any) -> bool:
    return isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape != target.shape


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise ExecutionError(f"loss_fn returns {type(loss).__name__}: return a tensor of one number")
    if loss.dim() != 0:
        raise ExecutionError(
            f"loss_fn returns a tensor of shape {list(loss.shape)}: return one number, such as its mean()"
        )
    return loss
