"""Which unit keeps which memory from F to B, so that the units of a stage add up to what the stage keeps.

A value that crosses borders may be needed by the backward passes of several units. Within a stage it is there
once, so it is counted once, with the first unit that keeps it::

    unit 0          unit 1             unit 2
    h = relu(...)   a = linear(h)      b = linear(h) + a        h: with unit 0, which keeps its own result
                                                                a: nobody keeps it

A stage that begins behind unit 0 is sent a copy of `h`, and keeps that: the *entry* of the border. A stage
holds on to what it has sent, too, so one that ends with unit 1 keeps `a`: the *exit* of the border.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from partita._torch.tensors.storage import storage_of
from partita.graph.liveness import tensor_bytes
from partita.pipelining.measuring.pass_memory import PassMemory
from partita.planning.costs.gradient_memory import CrossingGradient, SharedGradient
from partita.planning.costs.spanning import SpanningValue, SpanningView

__all__ = ["KeptMemory", "UnitValues", "kept_memory"]


class UnitValues(Protocol):
    """A unit with the names of the values that it takes and returns."""

    @property
    def inputs(self) -> Sequence[str]:
        """One name for each of `PassMemory.keeps_input`."""

    @property
    def outputs(self) -> Sequence[str]:
        """One name for each of `PassMemory.outputs`."""


@dataclass(frozen=True)
class KeptMemory:
    """What a model keeps of one microbatch, in bytes.

    Attributes:
        activations: one number a unit.
        left: one number a unit: what its I leaves to W.
        entry: one number a border: what the stage behind it keeps of what crosses, beyond its units' own.
        entry_left: one number a border: what of its entry is needed by a unit behind it, so that I may leave
            it to W; a stage lets go of the rest of its entry and of its exit when I has run.
        exit: what the stage in front of a border keeps of what crosses, beyond its units' own.
        passing: one number a border: of what is made in front of it, what no unit keeps and none but the one
            right behind is given.
        returned: one number a unit: of what a stage that ends with it returns, what units in front keep.
        spanning: the values that go past units.
        gradients: one number a border: of the gradients that cross it, in the backward pass.
        shared_gradients: those that lie in one memory, or in a larger one.
    """

    activations: tuple[int, ...]
    left: tuple[int, ...]
    entry: tuple[int, ...]
    entry_left: tuple[int, ...]
    exit: tuple[int, ...]
    passing: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    spanning: tuple[SpanningValue, ...] = ()
    gradients: tuple[int, ...] = ()
    shared_gradients: tuple[SharedGradient, ...] = ()


@dataclass
class _Memory:
    """One storage that crosses borders.

    Attributes:
        maker: the unit that makes it; -1 for the model's inputs.
        keeper: the first unit whose backward pass needs it; None: no unit's.
        last_in_w: the last unit whose W needs it; -1: no unit's.
        last: the last unit that is given it.
        writer: the last unit that writes to it.
        users: the units that are given it.
        is_result: whether the model returns it.
        has_gradient: whether there is a gradient of it.
        views: what is sent of it, one for each name that has it.
    """

    size: int
    maker: int
    keeper: int | None = None
    last_in_w: int = -1
    last: int = -1
    writer: int = -1
    users: list[int] = field(default_factory=list)
    is_result: bool = False
    has_gradient: bool = False
    views: list[_View] = field(default_factory=list)


@dataclass
class _View:
    """A name of a storage: the bytes that it shows, who makes it, and the last unit that is given it."""

    bytes: int
    has_gradient: bool
    maker: int
    last: int = -1

    def spanning(self) -> SpanningView:
        gradient = self.bytes if self.has_gradient else 0
        return SpanningView(self.bytes, gradient, self.maker, self.last)


def kept_memory(
    units: Sequence[UnitValues],
    memories: Sequence[PassMemory | None],
    inputs: Mapping[str, Any],
    *,
    results: Collection[str] = (),
    written: Sequence[Collection[str]] = (),
) -> KeptMemory:
    """Attribute each storage to the first unit that keeps it.

    Args:
        memories: of each unit; None for one that computes nothing.
        inputs: the model's, by name. They are the caller's, and count only where they are sent on.
        results: names of what the model returns: the last stage has it until its B, and so has the stage that
            has made it.
        written: for each unit the names of the inputs that it writes to: a stage is sent these, and writes to
            copies.
    """
    # 1. Follow each storage through the units: who makes, writes to, keeps and last uses it.
    storages: dict[str, _Memory] = {
        name: _Memory(_size(value), -1) for name, value in inputs.items() if isinstance(value, Tensor)
    }
    views = {
        name: _View(tensor_bytes(value) or 0, False, -1)
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }
    for name, view in views.items():
        storages[name].views.append(view)
    own = [0] * len(units)
    left = [0] * len(units)
    crossing = list(storages.values())
    sliced: dict[tuple[int, int], tuple[int, list[str]]] = {}
    for number, (unit, memory) in enumerate(zip(units, memories, strict=True)):
        if memory is None:
            continue
        own[number], left[number] = memory.own_bytes, memory.left_bytes
        needs = zip(unit.inputs, memory.keeps_input, memory.leaves_input, strict=True)
        for name, keeps, leaves in needs:
            storage = storages.get(name)
            if storage is None:  # a number
                continue
            storage.last = views[name].last = number
            storage.users.append(number)
            if written and name in written[number]:
                storage.writer = number
            if keeps:
                storage.keeper = number if storage.keeper is None else storage.keeper
            if leaves:
                storage.last_in_w = number
        for name, gradient in zip(unit.inputs, memory.gradients, strict=False):
            if gradient is not None:
                sliced.setdefault((number, gradient[0]), (gradient[1], []))[1].append(name)
        own_outputs: dict[int, _Memory] = {}
        for name, output in zip(unit.outputs, memory.outputs, strict=True):
            if output is None:
                continue
            views[name] = _View(output.sent_bytes, output.wants_gradient, number)
            if output.of_input is not None and unit.inputs[output.of_input] in storages:
                storages[name] = storages[unit.inputs[output.of_input]]
                storages[name].views.append(views[name])
                continue
            storage = own_outputs.setdefault(output.number, _Memory(output.size, number))
            storages[name] = storage
            storage.views.append(views[name])
            storage.has_gradient |= output.wants_gradient
            if output.is_kept:
                storage.keeper = number
            if output.is_left:
                storage.last_in_w = number
        crossing += own_outputs.values()
        if number == len(units) - 1:
            results = {*results, *unit.outputs}
    # 2. Results stay until the end, with whoever made them.
    for name in results:
        if (storage := storages.get(name)) is not None:
            storage.is_result = True
            storage.last = views[name].last = len(units) - 1
            if storage.keeper is None and storage.maker >= 0:
                storage.keeper = storage.maker
    # 3. A storage counts once, for the unit that keeps it; and at each border that it crosses.
    for storage in crossing:
        if storage.keeper is not None and storage.maker >= 0:
            own[storage.keeper] += storage.size
            if storage.last_in_w >= 0:
                left[storage.keeper] += storage.size
    # 4. A gradient that its maker's W waits for may be a slice of a larger one, and keeps all of that.
    for (user, _), (size, names) in sliced.items():
        slices = [
            (storages[name].maker, views[name].bytes)
            for name in names
            if name in storages and _is_caught_of(storages[name], user, memories)
        ]
        if slices:
            left[slices[0][0]] += max(size - sum(shown for _, shown in slices), 0)
    borders = range(len(units) - 1)
    return KeptMemory(
        tuple(own),
        tuple(left),
        tuple(
            sum(it.size * (_enters(it, border) + _is_copied(it, border)) for it in crossing)
            for border in borders
        ),
        tuple(
            sum(it.size for it in crossing if _enters(it, border) and it.last_in_w > border)
            for border in borders
        ),
        tuple(sum(it.size for it in crossing if _leaves(it, border)) for border in borders),
        tuple(
            sum(it.size for it in crossing if _leaves(it, border) and _passes(it, border))
            for border in borders
        ),
        tuple(sum(it.size for it in crossing if _is_returned(it, end)) for end in range(len(units))),
        tuple(_spanning(it) for it in crossing if it.last - it.maker > 1),
        tuple(
            sum(
                view.bytes
                for view in views.values()
                if view.has_gradient and view.maker <= border < view.last
            )
            for border in borders
        ),
        _shared_gradients(units, memories, sliced, _crossing_gradients(storages, crossing)),
    )


def _crossing_gradients(
    storages: Mapping[str, _Memory], crossing: Sequence[_Memory]
) -> dict[str, CrossingGradient]:
    """By name, the gradients of what crosses borders, of values that are the whole of their memory."""
    gradients: dict[int, CrossingGradient] = {}
    direct: dict[int, int] = {}
    spanning = 0
    for storage in crossing:
        is_spanning, is_direct = storage.last - storage.maker > 1, storage.last - storage.maker == 1
        if storage.has_gradient and len(storage.views) == 1:
            if is_spanning:
                gradients[id(storage)] = CrossingGradient(storage.size, spanning)
            elif is_direct:
                number = direct.get(storage.maker, 0)
                direct[storage.maker] = number + 1
                gradients[id(storage)] = CrossingGradient(storage.size, None, number)
        spanning += is_spanning
    return {name: gradients[id(storage)] for name, storage in storages.items() if id(storage) in gradients}


def _shared_gradients(
    units: Sequence[UnitValues],
    memories: Sequence[PassMemory | None],
    sliced: Mapping[tuple[int, int], tuple[int, list[str]]],
    gradients: Mapping[str, CrossingGradient],
) -> tuple[SharedGradient, ...]:
    """Those of inputs of a unit that share a memory, or have that of the gradient of an output."""
    shared = []
    for (number, _), (size, names) in sliced.items():
        inputs = tuple(gradients[name] for name in names if name in gradients)
        memory, unit = memories[number], units[number]
        if not inputs or memory is None:
            continue
        passed = memory.passed_on[unit.inputs.index(names[0])]
        output = None if passed is None else gradients.get(unit.outputs[passed])
        if passed is not None and output is None:
            continue  # of the model's result: made in the unit, with the loss
        if output is not None or len(inputs) > 1 or size > inputs[0].bytes:
            shared.append(SharedGradient(number, size, inputs, output))
    return tuple(shared)


def _spanning(storage: _Memory) -> SpanningValue:
    users = {user for user in (*storage.users, storage.last) if user > storage.maker}
    gradient = storage.size if storage.has_gradient else 0
    views = tuple(view.spanning() for view in storage.views if view.last > view.maker)
    is_whole = views == (SpanningView(storage.size, gradient, storage.maker, storage.last),)
    return SpanningValue(
        storage.size,
        gradient,
        storage.maker,
        tuple(sorted(users)),
        storage.keeper,
        None if is_whole else views,
    )


def _is_caught_of(storage: _Memory, user: int, memories: Sequence[PassMemory | None]) -> bool:
    """Whether its maker's W needs its gradient as it comes from this unit, with no other's added to it."""
    maker = memories[storage.maker] if storage.maker >= 0 else None
    return maker is not None and maker.caught_bytes > 0 and storage.users == [user] and not storage.is_result


def _enters(storage: _Memory, border: int) -> bool:
    """Whether it is sent across, and no unit behind the border is the first to keep it."""
    crosses = storage.maker <= border < storage.last
    return crosses and (storage.maker < 0 or storage.keeper is None or storage.keeper <= border)


def _is_copied(storage: _Memory, border: int) -> bool:
    """Whether it is sent across to where it is written to."""
    return storage.maker <= border < storage.writer


def _leaves(storage: _Memory, border: int) -> bool:
    """Whether it is made in front of the border and sent across, and no unit in front keeps it."""
    crosses = 0 <= storage.maker <= border < storage.last
    return crosses and (storage.keeper is None or storage.keeper > border)


def _is_returned(storage: _Memory, end: int) -> bool:
    """Whether a stage that ends with a unit returns it, and a unit of the model up to there keeps it."""
    is_returned = storage.last > end or storage.is_result
    return is_returned and storage.keeper is not None and 0 <= storage.maker <= storage.keeper <= end


def _passes(storage: _Memory, border: int) -> bool:
    """Whether no unit keeps it, and the one behind the border is the last that is given it."""
    return storage.keeper is None and storage.last == border + 1


def _size(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    return tensor.numel() * tensor.element_size() if storage is None else storage.nbytes()
