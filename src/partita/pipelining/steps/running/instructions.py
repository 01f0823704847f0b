"""What a rank does in a step: one small object for each action, with all that it needs looked up before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from partita._torch.autograd.engine import hooks_made
from partita.errors import ExecutionError, PartitaError, SignatureMismatch
from partita.pipelining.blocks.transfer import receive_bundle, send_bundle
from partita.pipelining.interface.layout import (
    are_compact,
    compact_trailer,
    empty_trailer,
    packed,
    trailer_of,
)
from partita.pipelining.interface.loss import OutputLoss
from partita.pipelining.interface.values import Value
from partita.pipelining.stages.flight import detached
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.running.mailbox import Delivery, Inbox, Outbox
from partita.pipelining.steps.running.step import StepState
from partita.planning import Action
from partita.runtime import Comm, Handle, finish_all, keyed, wait_all

__all__ = [
    "Backward",
    "Forward",
    "Instruction",
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

    def run(self) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class Forward:
    """F: the forward pass of one microbatch; on the last stage also its result and its loss."""

    action: Action
    microbatch: int
    stage: Stage
    step: StepState
    inbox: Inbox | None
    delivery: Delivery
    loss_fn: LossFunction | None
    train: bool

    def run(self) -> None:
        step, stage, microbatch = self.step, self.stage, self.microbatch
        assert self.inbox is not None
        values = self.inbox.take()
        if stage.is_first and step.inputs.arguments is not None:
            values.update(step.inputs.arguments[microbatch])
        with keyed(step.key(microbatch)):
            outputs = stage.forward(microbatch, values, train=self.train)
        if values:
            outputs = values | outputs
        if stage.is_last:
            self._finish()
        self.delivery.put(outputs)

    def _finish(self) -> None:
        step, microbatch = self.step, self.microbatch
        output = self.stage.assemble()
        if step.inputs.keep_outputs:
            step.outputs[microbatch] = detached(output)
        targets = step.inputs.targets
        own = isinstance(self.loss_fn, OutputLoss) and self.loss_fn.is_in(output)
        if self.loss_fn is None or not (self.train or targets or own):
            return
        before = hooks_made()
        target = targets[microbatch] if targets else None
        loss = _checked(_loss_of(self.loss_fn, output, target, step.inputs.loss_kwargs))
        # A copy: what a reduction returns may lie in memory as large as what was reduced (mse_loss).
        step.losses[microbatch] = loss.detach().clone()
        if self.train:
            step.loss_leaves.check(loss)
            seed = step.seed(microbatch, loss)
            self.stage.start_from(microbatch, loss, seed, hooked=hooks_made() != before)


@dataclass(slots=True, eq=False, repr=False)
class Backward:
    """B or I: ``backward`` is the stage's method for it."""

    action: Action
    microbatch: int
    backward: Callable[[int, dict[str, Tensor]], dict[str, Tensor | None]]
    step: StepState
    inbox: Inbox | None
    delivery: Delivery

    def run(self) -> None:
        assert self.inbox is not None
        gradients = self.inbox.take()
        with keyed(self.step.key(self.microbatch), backward=True):
            results = self.backward(self.microbatch, gradients)
        self.delivery.put(results)


@dataclass(slots=True, eq=False, repr=False)
class WeightBackward:
    """W: the gradients of the stage's parameters, which I has left out."""

    action: Action
    microbatch: int
    stage: Stage
    step: StepState
    inbox: Inbox | None = None

    def run(self) -> None:
        with keyed(self.step.key(self.microbatch), backward=True):
            self.stage.backward_weight(self.microbatch)


@dataclass(slots=True, eq=False, repr=False)
class _Transfer:
    """A message from one rank to another for one microbatch.

    Attributes:
        rank: the other one.
        values: what the message is made of, each with its tag.
        trailer_tag: the tag of what is sent after the tensors.
    """

    action: Action
    microbatch: int
    step: StepState
    comm: Comm
    rank: int
    values: Sequence[tuple[Value, int]]
    trailer_tag: int
    inbox: Inbox | None = field(default=None, init=False)
    _bundles: list[tuple[str, int]] = field(init=False)
    _tensors: list[Value] = field(init=False)
    _names: list[str] = field(init=False)
    _tags: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._bundles = [(value.name, tag) for value, tag in self.values if value.bundle]
        self._tensors = [value for value, _ in self.values if not value.bundle]
        self._names = [value.name for value in self._tensors]
        self._tags = (*(tag for value, tag in self.values if not value.bundle), self.trailer_tag)


@dataclass(slots=True, eq=False, repr=False)
class Send(_Transfer):
    """SEND_F or SEND_B: starts sending, and does not wait.

    Attributes:
        outbox: where the values are.
        answered: earlier sends that are let go of first (see ``partita.planning.SendEnds``).
        unanswered: earlier sends that are waited for first (see there).
        handles: of what is under way.
    """

    outbox: Outbox
    answered: tuple[Send, ...] = ()
    unanswered: tuple[Send, ...] = ()
    handles: list[Handle] = field(default_factory=list)
    _trailer: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super(Send, self).__post_init__()
        self._trailer = compact_trailer(tuple(len(value.shape) for value in self._tensors))

    def run(self) -> None:
        for earlier in self.answered:
            finish_all(earlier.handles)
            earlier.clear()
        for earlier in self.unanswered:
            wait_all(earlier.handles)
            earlier.clear()
        outbox, comm = self.outbox, self.comm
        for name, tag in self._bundles:
            device = self.step.devices[self.action.stage]
            self.handles += send_bundle(comm, outbox[name], self.rank, tag, device)
        if self._tensors:
            tensors = [outbox.get(name) for name in self._names]
            tensors = self.step.placed(self.action.stage, tensors, self._tensors)
            message = (*tensors, self._trailer) if are_compact(tensors) else self._packed(tensors)
            self.handles.append(comm.send_together(message, self.rank, self._tags))
        outbox.clear()

    def _packed(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        data = [
            self._blank(value) if tensor is None else packed(tensor)
            for value, tensor in zip(self._tensors, tensors, strict=True)
        ]
        return [*data, trailer_of(tensors, data)]

    def _blank(self, value: Value) -> Tensor:
        """A message has all of its values: zeros stand for what is not there."""
        return self.step.empty_like_value(self.action, self.microbatch, value).zero_()

    def clear(self) -> None:
        """Free its memory: it has left, or there was a failure."""
        self.handles.clear()


@dataclass(slots=True, eq=False, repr=False)
class Receive(_Transfer):
    """RECV_F or RECV_B: allocates memory for a message, and starts receiving.

    The memory belongs to whoever takes the value: autograd keeps some of it for the backward pass. So it is
    used for no other microbatch before its last user lets go; torch's allocator has it back then, or the
    stage's `input_memory`.

    The trailer is short, and so arrives whole or not at all: only for such messages gloo reports reliably
    that a connection has ended (see ``partita.runtime.comms.waiters``). The numbers are here when it is.

    Attributes:
        to: who takes the message.
    """

    to: Inbox
    _trailer: Tensor | None = field(default=None, init=False)

    def run(self) -> None:
        comm, to, rank, action = self.comm, self.to, self.rank, self.action
        for name, tag in self._bundles:
            to.values[name] = receive_bundle(comm, rank, tag, self.step.devices[action.stage], to.handles)
        if not self._tensors:
            return
        empty, microbatch = self.step.empty_like_value, self.microbatch
        data = [empty(action, microbatch, value) for value in self._tensors]
        trailer = self._trailer
        if trailer is None:  # of one length, and read before this receives again
            trailer = self._trailer = empty_trailer(data)
        to.messages.append((self._names, trailer, data))
        to.handles.append(comm.recv_together([*data, trailer], rank, self._tags))


@dataclass(slots=True, eq=False, repr=False)
class StageCall:
    """UNSHARD, RESHARD or REDUCE_GRAD: calls the stage's hook for it, if there is one."""

    action: Action
    stage: Stage
    inbox: Inbox | None = None

    def run(self) -> None:
        hook = self.stage.hooks.get(self.action.kind)
        if hook is not None:
            hook()


_OUT_OF_REACH = "appears to not have been used in the graph"


def _loss_of(loss_fn: Callable[..., Tensor], output: Any, target: Any, keywords: Mapping[str, Any]) -> Tensor:
    """The loss. Where ``loss_fn`` fails for want of a target, because output and target differ in shape,
    or because it asks for gradients of what other stages compute with, the error says so.
    """
    try:
        return loss_fn(output, target, **keywords)
    except (AttributeError, TypeError) as error:
        if target is not None or "NoneType" not in str(error) or isinstance(error, PartitaError):
            raise
        raise SignatureMismatch(
            f"loss_fn fails without a target ({type(error).__name__}: {error}): give step() target=..., on "
            "the rank of the last stage at least"
        ) from error
    except LookupError as error:
        if not isinstance(loss_fn, OutputLoss):
            raise
        raise SignatureMismatch(
            f"the loss is the model's own, and its output has none (no {error}): give step() what the model "
            "computes it from, such as labels"
        ) from error
    except (RuntimeError, ValueError) as error:
        if _OUT_OF_REACH in str(error):
            raise ExecutionError(
                "loss_fn takes the gradient of a tensor that the last stage does not compute with: the graph "
                "behind an output goes back to what that stage was handed, and no further. Compute such a "
                "gradient (a penalty on it) in the model's forward, in a stage that holds all that it goes "
                'through, with frontend="modules"'
            ) from error
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
