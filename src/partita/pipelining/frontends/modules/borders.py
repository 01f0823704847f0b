"""From recordings of the example to stages: where each begins, which state it holds, what crosses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import nn

from partita._torch.modules.contents import named_state
from partita.errors import AssignmentError, CaptureError
from partita.listing import shared_atoms
from partita.pipelining.blocks.cut import BlockCut, Event, Site
from partita.pipelining.frontends.modules.recording import RecordedPass
from partita.pipelining.interface.shared_leaves import shares_of

__all__ = ["BlockPlan", "CallEdge", "Place", "plan_blocks"]

Place = tuple[str, int | None]
"""A module by its qualified name, and which of its calls; None: before the first, or after the last."""


class CallEdge(Enum):
    """The side of a module's call at which a model is cut."""

    BEFORE = 1
    AFTER = 2


@dataclass(frozen=True)
class BlockPlan:
    """What each stage of a model runs and holds.

    Attributes:
        cut: what the stages need for running.
        holders: the stages that hold each parameter and buffer, by name.
    """

    cut: BlockCut
    holders: Mapping[str, tuple[int, ...]]


class _Regions:
    """Which stage each function of a recording belongs to.

    Args:
        homes: the stages of modules that run in one stage only; see `StagePass.reached`.
    """

    def __init__(
        self, recording: RecordedPass, borders: Mapping[Event, int], homes: Mapping[str, int]
    ) -> None:
        self._positions: list[int] = []
        self._stages: list[int] = []
        self.begins: dict[int, Event] = {}
        stage = 0
        for moment in recording.moments:
            path, _, ends = moment.event
            there = max(borders.get(moment.event, 0), 0 if ends else homes.get(path, 0))
            if there > stage:
                stage = there
                self._positions.append(moment.position)
                self._stages.append(stage)
                self.begins[stage] = moment.event

    def of(self, position: int) -> int:
        """Return the stage of the function with that number; 0 for the arguments, whose number is -1."""
        place = bisect_right(self._positions, position)
        return self._stages[place - 1] if place else 0


def plan_blocks(
    model: nn.Module, recordings: Sequence[RecordedPass], places: Sequence[tuple[Place, CallEdge]]
) -> BlockPlan:
    """Work out the stages.

    Args:
        recordings: passes of the example; the first decides the order of the places.
        places: where to cut.

    Raises:
        AssignmentError: a module is never called, or not that often.
        CaptureError: stages would have to share memory.
    """
    for place, _ in places:
        if all(not recording.calls(place[0]) for recording in recordings):
            raise AssignmentError(
                f"no operation of the model belongs to {place[0]!r}: is the module called in forward?"
            )
    order = _ordered(recordings, places)
    stages = 1 + max(order.values(), default=0)
    borders: dict[bool, dict[Event, int]] = {True: {}, False: {}}
    for recording in recordings:
        borders[recording.training] |= {
            event: stage
            for (place, edge), stage in order.items()
            if (event := _event(recording, place, edge)) is not None
        }
    _check_enclosed(recordings, borders)
    pairs, homes = _regions(recordings, borders)
    unused = {
        training: _unused([pair for pair in pairs if pair[0].training is training], stages)
        for training in (True, False)
    }
    written: set[Site] = set()
    for recording, region in pairs:
        written |= {
            recording.sites[number]
            for position, number in recording.writes
            if region.of(position) > region.of(recording.producers[number])
        }
    used = _check_state(pairs)
    _check_leaves(pairs)
    cut = BlockCut(stages, borders, homes, unused, frozenset(written))
    return BlockPlan(cut, _holders(model, used, homes))


def _check_enclosed(recordings: Sequence[RecordedPass], borders: Mapping[bool, Mapping[Event, int]]) -> None:
    """Raise CaptureError where a border lies within what must lie in one stage."""
    for recording in recordings:
        own = borders[recording.training].keys()
        for path, _, _ in sorted(recording.checkpointed & own, key=str):
            raise CaptureError(
                f"the cut at {path!r} lies within torch.utils.checkpoint, which computes again what it holds "
                "and so must lie in one stage: let the module itself checkpoint what it calls, or cut "
                "at a module around it"
            )
        for path, _, _ in sorted(recording.transformed & own, key=str):
            raise CaptureError(
                f"the cut at {path!r} lies within a transform of torch.func (vmap, grad, jacrev), whose "
                "tensors can't leave it, and so must lie in one stage: cut at a module around it, or at "
                "another"
            )
        for path, _, _ in sorted(recording.functions & own, key=str):
            raise CaptureError(
                f"the cut at {path!r} lies within the forward pass of a torch.autograd.Function, whose "
                "backward pass needs all of it, and so must lie in one stage: cut at a module around it, or "
                "at another"
            )


def _ordered(
    recordings: Sequence[RecordedPass], places: Sequence[tuple[Place, CallEdge]]
) -> dict[tuple[Place, CallEdge], int]:
    """The stage that begins at each place. Places with no function between them begin one stage.

    A place that the first recording does not have is put into the order where another one has it.
    """
    order: list[tuple[Place, CallEdge]] = []
    recorded: list[dict[tuple[Place, CallEdge], int]] = []
    for recording in recordings:
        position_of = {moment.event: moment.position for moment in recording.moments}
        events = {where: _event(recording, *where) for where in places}
        positions = {where: position_of[event] for where, event in events.items() if event is not None}
        recorded.append(positions)
        last = -1
        for where in sorted(positions, key=positions.__getitem__):
            if where in order:
                if order.index(where) < last:
                    raise CaptureError(
                        "the model calls the modules that it is cut at in another order in training than in "
                        "evaluation: cut at others, or give modes='train' or 'eval'"
                    )
            else:
                order.insert(last + 1, where)
            last = order.index(where)
    stage, before, stages = 0, None, {}
    for where in order:
        seen = [
            (positions[where], recording.count)
            for positions, recording in zip(recorded, recordings, strict=True)
            if where in positions
        ]
        if all(position in (0, count) for position, count in seen):
            continue
        together = before is not None and all(
            positions[where] == positions[before]
            for positions in recorded
            if where in positions and before in positions
        )
        stage += not together
        stages[where] = stage
        before = where
    return stages


def _event(recording: RecordedPass, place: Place, edge: CallEdge) -> Event | None:
    path, call = place
    calls = recording.calls(path)
    if not calls:
        return None
    if call is None:
        call = calls[0] if edge is CallEdge.BEFORE else calls[-1]
    if call not in calls:
        raise AssignmentError(
            f"{path!r} is called {len(calls)} times: {', '.join(f'{path}@{number}' for number in calls)}; "
            f"say one of them, there is no {path}@{call}"
        )
    return path, call, edge is CallEdge.AFTER


def _regions(
    recordings: Sequence[RecordedPass], borders: Mapping[bool, Mapping[Event, int]]
) -> tuple[list[tuple[RecordedPass, _Regions]], dict[str, int]]:
    """The regions of each recording, and the stage of each module that is called in one stage only.

    Where a recording misses a border, modules behind it seem to belong to an earlier stage; so of all
    recordings the latest stage counts.
    """
    homes: dict[str, int] = {}
    several: set[str] = set()
    for recording in recordings:
        region = _Regions(recording, borders[recording.training], {})
        stages: dict[str, set[int]] = {}
        begun: dict[Event, int] = {}
        for moment in recording.moments:
            path, call, ends = moment.event
            if not ends:
                begun[moment.event] = moment.position
                continue
            start = begun[path, call, False]
            if moment.position > start:
                stages.setdefault(path, set()).update((region.of(start), region.of(moment.position - 1)))
        several |= {path for path, own in stages.items() if len(own) > 1}
        for path, own in stages.items():
            homes[path] = max(homes.get(path, 0), *own)
    homes = {path: stage for path, stage in homes.items() if path not in several}
    return [(one, _Regions(one, borders[one.training], homes)) for one in recordings], homes


def _unused(pairs: Sequence[tuple[RecordedPass, _Regions]], stages: int) -> dict[int, frozenset[Site]]:
    """For each stage the sites of values that are alive when it begins and not used from there on.

    None where random numbers leave modules out: a module that no recording has called there may use them.
    """
    unused: dict[int, set[Site]] = {stage: set() for stage in range(1, stages)}
    if _differ_in_calls([recording for recording, _ in pairs]):
        return {stage: frozenset() for stage in unused}
    used: dict[int, set[Site]] = {stage: set() for stage in range(1, stages)}
    for recording, region in pairs:
        last = [-1] * len(recording.producers)
        for position, number in recording.uses:
            stage = stages - 1 if position == recording.count else region.of(position)
            last[number] = max(last[number], stage)
        for stage in unused:
            event = region.begins.get(stage)
            for number in recording.alive.get(event, ()) if event is not None else ():
                (used if last[number] >= stage else unused)[stage].add(recording.sites[number])
    return {stage: frozenset(unused[stage] - used[stage]) for stage in unused}


def _differ_in_calls(recordings: Sequence[RecordedPass]) -> bool:
    ways: dict[bool, set[tuple[Event, ...]]] = {}
    for recording in recordings:
        ways.setdefault(recording.training, set()).add(tuple(moment.event for moment in recording.moments))
    return any(len(events) > 1 for events in ways.values())


def _check_state(pairs: Sequence[tuple[RecordedPass, _Regions]]) -> dict[str, set[int]]:
    """The stages that use each parameter and buffer, by name.

    Raises:
        CaptureError: one stage writes to a buffer and another one uses it.
    """
    used: dict[str, set[int]] = {}
    writers: dict[str, set[int]] = {}
    for recording, region in pairs:
        for position, name in recording.state_uses:
            used.setdefault(name, set()).add(region.of(position))
        for position, name in recording.state_writes:
            writers.setdefault(name, set()).add(region.of(position))
    for name in writers:
        if len(used[name]) > 1:
            owner = name.rpartition(".")[0] or "the model"
            stages = sorted(used[name])
            raise CaptureError(
                f"{owner!r} has buffers ({name!r}) and runs in stages {stages[0]} and {stages[-1]}, which "
                "can't share them: cut so that one stage has all of its calls"
            )
    return used


def _check_leaves(pairs: Sequence[tuple[RecordedPass, _Regions]]) -> None:
    """Raise CaptureError where gradients go to one tensor in several stages that is no parameter."""
    for recording, region in pairs:
        users: dict[int, set[int]] = {}
        for position, number in recording.leaf_uses:
            users.setdefault(number, set()).add(region.of(position))
        for number, stages in users.items():
            if len(stages) > 1:
                raise CaptureError(shares_of(recording.leaf_names[number], sorted(stages)))


def _holders(
    model: nn.Module, used: Mapping[str, set[int]], homes: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter and buffer, under all of its names.

    One that the example does not use goes to the stage of the module around it, or to that of the parameter
    with the most similar name.
    """
    tensors = dict(named_state(model))
    stages: dict[int, set[int]] = {}
    for name, users in used.items():
        if name in tensors:
            stages.setdefault(id(tensors[name]), set()).update(users)
    for name, tensor in tensors.items():
        if id(tensor) not in stages:
            path = name.rpartition(".")[0]
            while path and path not in homes:
                path = path.rpartition(".")[0]
            if path in homes:
                stages[id(tensor)] = {homes[path]}
    placed = {name: stages[id(tensor)] for name, tensor in tensors.items() if id(tensor) in stages}
    for name, tensor in tensors.items():
        if id(tensor) not in stages:
            nearest = max(placed, key=lambda other: shared_atoms(other, name), default=None)
            stages[id(tensor)] = {min(placed[nearest])} if nearest is not None else {0}
    return {name: tuple(sorted(stages[id(tensor)])) for name, tensor in tensors.items()}
