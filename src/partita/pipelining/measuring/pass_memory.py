"""What a unit keeps from F to B and from I to W, and what its passes need at most while they run.

Whatever is still alive after a pass is kept, whoever keeps it: autograd's saved tensors, a custom function's
own attributes, a gradient that I caught for W. So memory is not asked for but watched, by `LiveBytes`::

    F   inputs ── unit ── outputs      dropped: inputs and outputs. What is alive then, autograd keeps.
    I   ── gradients of inputs         dropped: these, and all that came in. What is alive then, W needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from partita._torch.autograd.engine import run_backward
from partita._torch.autograd.running_pass import takes_gradient
from partita._torch.containers.pytree import flatten, tree_map
from partita._torch.operators.fused_attention import FusedAttention
from partita._torch.tensors.live_bytes import LiveBytes
from partita._torch.tensors.storage import WeakStorage, storage_key, storage_of
from partita.graph.liveness import tensor_bytes
from partita.pipelining.measuring.unit_run import UnitRun
from partita.pipelining.stages.backward.arrivals import Arrivals
from partita.pipelining.stages.backward.split_backward import input_pass

__all__ = ["OutputMemory", "PassMemory", "pass_memory"]


@dataclass(frozen=True)
class OutputMemory:
    """The memory of one output.

    Attributes:
        number: equal for outputs that share their memory.
        size: its bytes.
        shown: the bytes of the output itself, where it is a view of another size than its memory: they are
            what is sent of it.
        of_input: the input whose memory it is; None where the unit made it.
        is_kept: whether the unit's backward pass needs it.
        is_left: whether its W does.
        wants_gradient: whether it has one.
    """

    number: int
    size: int
    of_input: int | None
    is_kept: bool
    wants_gradient: bool = False
    shown: int | None = None
    is_left: bool = False

    @property
    def sent_bytes(self) -> int:
        """What a stage sends of it."""
        return self.size if self.shown is None else self.shown


@dataclass(frozen=True)
class PassMemory:
    """The memory of a unit, in bytes of one microbatch.

    Attributes:
        own_bytes: kept from F to B, of what is neither an input nor an output.
        keeps_input: for each input whether it is kept.
        outputs: one an output; None for what is no tensor.
        left_bytes: what is left between I and W, of what is neither an input nor an output.
        caught_bytes: of these, gradients of outputs, as they were sent to the unit.
        leaves_input: for each input whether it is left.
        forward_workspace_bytes: alive at most in F, beyond what is there when it ends.
        backward_workspace_bytes: alive at most in B, beyond what is kept.
        copied_gradient_bytes: alive at most in B beyond that where the inputs are a stage's: autograd gives
            each leaf a gradient of its own, as it does for parameters.
        input_workspace_bytes: alive at most in I, beyond what is kept; what I catches for W counts.
        weight_workspace_bytes: alive at most in W, beyond what is left to it.
        gradients: for each input the memory that its gradient lies in, as I returns it, None where it has
            none: a number that is equal for inputs whose gradients share it, as slices of what a
            concatenation is sent do; and its bytes.
        passed_on: for each input the output whose gradient it gets, as it was sent; None where it is another.
        has_weights: whether W computes anything.
    """

    own_bytes: int
    keeps_input: tuple[bool, ...]
    outputs: tuple[OutputMemory | None, ...]
    left_bytes: int
    caught_bytes: int
    leaves_input: tuple[bool, ...]
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    copied_gradient_bytes: int
    input_workspace_bytes: int
    weight_workspace_bytes: int
    gradients: tuple[tuple[int, int] | None, ...] = ()
    passed_on: tuple[int | None, ...] = ()
    has_weights: bool = True


def pass_memory(unit: UnitRun) -> PassMemory:
    """Run a unit a few times and watch its memory."""
    unit.prepare_gradients()
    try:
        with FusedAttention():
            own_bytes, keeps_input, outputs, forward_workspace = _kept(unit)
            as_first, takes_over = _whole_workspace(unit, is_first=True)
            whole_workspace = as_first if takes_over else _whole_workspace(unit, is_first=False)[0]
            halves = _halves(unit)
    finally:
        unit.drop_gradients()
    return PassMemory(
        own_bytes,
        keeps_input,
        tuple(
            output if output is None else replace(output, is_left=is_left)
            for output, is_left in zip(outputs, halves.leaves_output, strict=True)
        ),
        halves.left_bytes,
        halves.caught_bytes,
        halves.leaves_input,
        forward_workspace,
        whole_workspace,
        max(as_first - whole_workspace, 0),
        halves.input_workspace_bytes,
        halves.weight_workspace_bytes,
        halves.gradients,
        halves.passed_on,
        halves.has_weights,
    )


def _kept(unit: UnitRun) -> tuple[int, tuple[bool, ...], tuple[OutputMemory | None, ...], int]:
    """What is kept from F to B: own bytes, which inputs, which outputs; and the workspace of F."""
    _, arguments = unit.leaves()
    # Copies with a history, as within a stage: autograd keeps any leaf that wants a gradient.
    arguments = [tree_map(_copied, argument) for argument in arguments]
    input_tensors = [_tensors(argument) for argument in arguments]
    input_of = {
        storage_key(tensor): number for number, tensors in enumerate(input_tensors) for tensor in tensors
    }
    watched = [[WeakStorage(tensor) for tensor in tensors] for tensors in input_tensors]
    del input_tensors
    with LiveBytes() as live:
        outputs = unit.call(*arguments)
        keys, sizes = zip(*map(_memory_of, outputs), strict=True) if outputs else ((), ())
        wants = [isinstance(it, Tensor) and takes_gradient(it) for it in outputs]
        shown = [tensor_bytes(it) for it in outputs]
        edges = [get_gradient_edge(it) for it in outputs if isinstance(it, Tensor) and takes_gradient(it)]
        workspace = live.most - live.now()
        del outputs, arguments
        alive = live.alive()
    keeps_input = tuple(any(storage.is_alive() for storage in storages) for storages in watched)
    of_outputs = tuple(
        None
        if key is None
        else OutputMemory(
            keys.index(key),
            size,
            input_of.get(key),
            keeps_input[input_of[key]] if key in input_of else key in alive,
            wants_gradient,
            None if sent == size else sent,
        )
        for key, size, wants_gradient, sent in zip(keys, sizes, wants, shown, strict=True)
    )
    own = sum(size for key, size in alive.items() if key not in keys)
    del edges
    return own, keeps_input, of_outputs, workspace


class _FromTheUnitInFront(Function):
    """A copy of a value, with a history that takes the gradient as it comes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.gradients.append(gradient)
        return None, None


def _whole_workspace(unit: UnitRun, *, is_first: bool) -> tuple[int, bool]:
    """What B needs beyond what is kept, of the first unit of a stage or of one within it; and whether each
    leaf took over the gradient that came, so that the other one needs the same.

    An input that is an output too is where B starts within a stage, and has no B as a leaf.
    """
    leaves, arguments = unit.leaves()
    gradients: list[Tensor] = []
    arrived: dict[int, int | None] = {}
    if not is_first:

        def within_stage(value: Any) -> Any:
            is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
            return _FromTheUnitInFront.apply(value, gradients) if is_leaf else value

        arguments = [tree_map(within_stage, argument) for argument in arguments]
    with LiveBytes() as live:
        outputs = unit.call(*arguments)
        before = live.start_anew()
        roots, seeds = unit.roots(outputs)
        is_passed_on = any(isinstance(it, Tensor) and it.requires_grad and it.is_leaf for it in outputs)
        if not roots:
            return 0, not is_passed_on
        for number, leaf in enumerate(leaves):
            leaf.register_hook(partial(_note_memory, arrived, number))
        arrivals = Arrivals(leaves)
        run_backward(roots, seeds, accumulate=True)
        arrivals.gradients()
        takes_over = not is_passed_on and all(
            leaf.grad is None or _memory_of(leaf.grad)[0] == arrived[number] is not None
            for number, leaf in enumerate(leaves)
        )
        return live.most - before, takes_over


def _note_memory(memories: dict[int, int | None], number: int, gradient: Tensor) -> None:
    """Whose memory a gradient is; to hold on to the gradient itself would make autograd copy it."""
    memories[number] = _memory_of(gradient)[0]


class _Halves(NamedTuple):
    """What is left between I and W, and what each of them needs beyond what is there when it starts."""

    left_bytes: int
    caught_bytes: int
    leaves_input: tuple[bool, ...]
    leaves_output: tuple[bool, ...]
    input_workspace_bytes: int
    weight_workspace_bytes: int
    gradients: tuple[tuple[int, int] | None, ...]
    passed_on: tuple[int | None, ...]
    has_weights: bool


def _halves(unit: UnitRun) -> _Halves:
    leaves, arguments = unit.leaves()
    # Copies with a history, as in `_kept`.
    arguments = [tree_map(_copied, argument) for argument in arguments]
    watched = [[WeakStorage(tensor) for tensor in _tensors(argument)] for argument in arguments]
    with LiveBytes() as live:
        outputs = unit.call(*arguments)
        keys = [_memory_of(output)[0] for output in outputs]
        before = live.start_anew()
        roots, seeds = unit.roots(outputs)
        if not roots:
            return _Halves(
                0, 0, (False,) * len(watched), (False,) * len(keys), 0, 0, (), (), has_weights=False
            )
        # In a stage W of the units behind this one holds on to the nodes that they start from, and through
        # these to all that is in front.
        behind = [] if unit.is_last else [get_gradient_edge(root) for root in roots]
        sent = [_memory_of(seed)[0] for seed in seeds]
        half = input_pass(roots, seeds, leaves)
        input_workspace = live.most - before
        weights, has_weights = half.weights, not half.weights.is_empty
        gradients = _memory_of_gradients(unit.inputs, half.gradients)
        passed_on = _passed_on(gradients, outputs, roots, sent)
        del outputs, arguments, roots, seeds, half, leaves
        alive = live.alive()
        leaves_input = tuple(any(storage.is_alive() for storage in storages) for storages in watched)
        before = live.start_anew()
        weights.run()
        del behind
        return _Halves(
            sum(size for key, size in alive.items() if key not in keys),
            sum(size for key, size in alive.items() if key in sent),
            leaves_input,
            tuple(key in alive for key in keys),
            input_workspace,
            live.most - before,
            _numbered(gradients),
            passed_on,
            has_weights,
        )


def _memory_of_gradients(
    inputs: Sequence[Any], gradients: Sequence[Tensor | None]
) -> list[tuple[int | None, int]]:
    """The storage of each gradient, and its bytes. Tensors that want one get it in order; containers are
    passed over.
    """
    ahead = iter(gradients)
    memories: list[tuple[int | None, int]] = []
    for value in inputs:
        own = [next(ahead, None) for it in flatten(value)[0] if isinstance(it, Tensor) and it.requires_grad]
        memories.append(_memory_of(own[0]) if isinstance(value, Tensor) and own else (None, 0))
    return memories


def _numbered(gradients: Sequence[tuple[int | None, int]]) -> tuple[tuple[int, int] | None, ...]:
    """See `PassMemory.gradients`."""
    keys = [key for key, _ in gradients]
    return tuple(None if key is None else (keys.index(key), size) for key, size in gradients)


def _passed_on(
    gradients: Sequence[tuple[int | None, int]],
    outputs: Sequence[Any],
    roots: Sequence[Tensor],
    sent: Sequence[int | None],
) -> tuple[int | None, ...]:
    """See `PassMemory.passed_on`."""
    numbers = {id(output): number for number, output in enumerate(outputs)}
    of_output = {key: numbers[id(root)] for root, key in zip(roots, sent, strict=True) if key is not None}
    return tuple(None if key is None else of_output.get(key) for key, _ in gradients)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(tree: Any) -> Sequence[Tensor]:
    """Those that have memory of their own, and be it on the meta device."""
    leaves = flatten(tree)[0]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and storage_of(leaf) is not None]


def _memory_of(output: Any) -> tuple[int | None, int]:
    storage = storage_of(output) if isinstance(output, Tensor) else None
    return (None, 0) if storage is None else (storage_key(output), storage.nbytes())
