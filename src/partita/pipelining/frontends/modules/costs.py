"""The costs of the blocks of a model that is cut between calls of its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from partita.capture.one_thread_at_a_time import one_thread_at_a_time
from partita.pipelining.blocks.cut import Event
from partita.pipelining.blocks.memos import memos_cleared
from partita.pipelining.frontends.modules.call_runs import CallRun, call_runs
from partita.pipelining.frontends.modules.recording import Moment, RecordedPass, cuda_devices
from partita.pipelining.measuring.kept_memory import kept_memory
from partita.pipelining.measuring.meter import meter_for
from partita.pipelining.measuring.pass_memory import PassMemory, pass_memory
from partita.pipelining.measuring.pass_times import pass_times
from partita.pipelining.measuring.unit_run import UnitRun
from partita.planning import CostModel, Unit
from partita.runtime.host_generators import generator_states, seed_generators, set_generators

__all__ = ["Example", "block_costs", "unit_places"]

Example = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments and keyword arguments of the model."""

_BACKWARD = 2.0
"""How much longer the backward pass of a function between calls is assumed to take than its forward pass."""
_REPEATS = 5
"""How often each call is timed, after a round that does not count."""
_BLOCKS_PER_STAGE = 2
"""With fewer blocks for each stage than this, blocks within blocks count too."""


@one_thread_at_a_time()
def block_costs(
    model: nn.Module, example: Example, recording: RecordedPass, stages: int | None = None
) -> tuple[CostModel, list[Event]]:
    """Return the units between the beginnings of blocks, with what they cost.

    The calls of modules that a unit is made of are run alone, as a stage would run them, equal ones once.
    Functions between them count as long as they took in the recorded pass.

    A block is a child of the model, or a member of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` that
    the example calls from the first to the last, each once (experts are no blocks: data decides which run).
    Where blocks are few, those within blocks count too; where these are not enough, any module that is
    called.

    Args:
        example: the arguments and keyword arguments that were recorded.
        stages: how many are wanted at least.

    Returns:
        The cost model, and for each of its borders the event at which it lies.
    """
    borders = _unit_borders(model, recording, stages)
    bytes_at = _bytes_across(recording, [moment.position for moment in borders])
    state = dict(model.named_parameters())
    # A parameter counts in the first unit that uses it.
    seen: set[str] = set()
    units = []
    ends = [*borders, Moment(("", 0, True), recording.count, recording.seconds)]
    start = Moment(("", 0, False), 0, 0.0)
    costs = _calls_costs(model, example, recording, borders)
    for number, (unit_name, end) in enumerate(zip(_names(model, borders), ends, strict=True)):
        names = {
            name
            for position, name in recording.state_uses
            if start.position <= position < end.position and name in state
        } - seen
        seen |= names
        parameters = [state[name] for name in names]
        measured = costs.units[number]
        # Functions between the calls of modules hold no weights, or few.
        between_s = measured.between_s if costs.has_calls else end.seconds - start.seconds
        backward_s = _BACKWARD * between_s
        in_w = number == 0 and measured.backward_s > 0.0 and not measured.input_s
        units.append(
            Unit(
                unit_name,
                measured.forward_s + between_s,
                measured.backward_s + backward_s,
                parameter_bytes=sum(value.numel() * value.element_size() for value in parameters),
                parameters=sum(value.numel() for value in parameters),
                activation_bytes=measured.activation_bytes,
                modules=(start.event[0],),
                backward_input_s=measured.input_s + (0.0 if in_w else backward_s),
                backward_weight_s=measured.weight_s + (backward_s if in_w else 0.0),
                weight_activation_bytes=measured.left_bytes,
                forward_workspace_bytes=measured.forward_workspace_bytes,
                backward_workspace_bytes=measured.backward_workspace_bytes,
                has_weights=measured.has_weights or not costs.has_calls,
                copied_gradient_bytes=max(measured.as_first_bytes - measured.backward_workspace_bytes, 0),
                spread=measured.spread,
            )
        )
        start = end
    model_costs = CostModel(tuple(units), tuple(bytes_at), entry_bytes=costs.entry, exit_bytes=costs.exit)
    return model_costs, [moment.event for moment in borders]


@dataclass
class _Measured:
    """The calls of modules in one unit, added up, and the seconds between them."""

    between_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    spread: float = 0.0
    activation_bytes: int = 0
    left_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    has_weights: bool = False
    as_first_bytes: int = 0
    """What B of its first call needs where that is a stage's first."""


@dataclass(frozen=True)
class _CallsCosts:
    """What the calls of each unit cost, and what the stages around each border keep of what crosses it."""

    units: list[_Measured]
    has_calls: bool
    entry: tuple[int, ...]
    exit: tuple[int, ...]


def _calls_costs(
    model: nn.Module, example: Example, recording: RecordedPass, borders: Sequence[Moment]
) -> _CallsCosts:
    """Run the outermost calls of each unit alone, equal ones once."""
    chosen = _outermost_calls(recording, borders)
    devices = cuda_devices([*model.parameters(), *model.buffers()])
    before = generator_states()
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), memos_cleared():
            seed_generators(0)
            torch.manual_seed(0)
            calls = call_runs(model, *example, {call.place for call in chosen}, training=recording.training)
            chosen = [call for call in chosen if call.place in calls]
            own = [calls[call.place] for call in chosen]
            runs = list({id(call.run): call.run for call in own}.values())
            memories = {id(run): memory for run in runs if (memory := _repeated(run, own)) is not None}
            runs = [run for run in runs if id(run) in memories]
            meter = meter_for([*model.parameters(), *model.buffers()])
            times = dict(zip(map(id, runs), pass_times(runs, meter, _REPEATS), strict=True))
    finally:
        set_generators(before)
    kept = kept_memory(own, [memories.get(id(call.run)) for call in own], {})
    units = [_Measured() for _ in range(len(borders) + 1)]
    for number, (call, run) in enumerate(zip(chosen, own, strict=True)):
        unit, time, memory = units[call.unit], times.get(id(run.run)), memories.get(id(run.run))
        if not meter.is_exact:
            # What comes before a call belongs to the unit of the call before.
            units[chosen[max(number - 1, 0)].unit].between_s += run.before_s
            unit.between_s += run.after_s + (run.own_s if time is None else 0.0)
        if time is None or memory is None:
            continue
        unit.forward_s += time.forward_s
        unit.backward_s += time.backward_s
        unit.input_s += time.input_s
        unit.weight_s += time.weight_s
        unit.spread = max(unit.spread, time.spread)
        unit.activation_bytes += kept.activations[number]
        unit.left_bytes += kept.left[number]
        unit.has_weights |= memory.has_weights
        unit.forward_workspace_bytes = max(unit.forward_workspace_bytes, memory.forward_workspace_bytes)
        unit.backward_workspace_bytes = max(unit.backward_workspace_bytes, memory.backward_workspace_bytes)
        if number == 0 or chosen[number - 1].unit != chosen[number].unit:
            unit.as_first_bytes = memory.backward_workspace_bytes + memory.copied_gradient_bytes
    # The border between two units lies before the first call of the second.
    firsts = [
        next((number for number, call in enumerate(chosen) if call.unit > border), len(chosen))
        for border in range(len(borders))
    ]
    between = range(len(chosen) - 1)
    return _CallsCosts(
        units,
        bool(chosen),
        tuple(kept.entry[first - 1] if first - 1 in between else 0 for first in firsts),
        tuple(kept.exit[first - 1] if first - 1 in between else 0 for first in firsts),
    )


def _repeated(run: UnitRun, calls: Sequence[CallRun]) -> PassMemory | None:
    """The memory of those calls that have the run; None where it can't be repeated, as of a module that uses
    up a list of its own, or returns something else each time. It then counts as long as it took in the pass.
    """
    try:
        memory = pass_memory(run)
    except Exception:  # whatever the user's module raises when it is called once more
        return None
    as_before = all(len(call.outputs) == len(memory.outputs) for call in calls if call.run is run)
    return memory if as_before else None


@dataclass(frozen=True)
class _Call:
    """A call of a module, and the unit that it lies in."""

    place: tuple[str, int]
    unit: int


def _outermost_calls(recording: RecordedPass, borders: Sequence[Moment]) -> list[_Call]:
    """The calls that lie within one unit, without those within such calls, in order."""
    starts = {moment.event for moment in borders}
    unit, calls = 0, list[_Call]()
    open_calls: list[tuple[Moment, int, int]] = []
    for moment in recording.moments:
        path, number, ends = moment.event
        unit += moment.event in starts
        if not ends:
            open_calls.append((moment, unit, len(calls)))
            continue
        begin, first_unit, inner = open_calls.pop()
        alone = begin.event not in recording.transformed  # its tensors belong to the transform
        if path and alone and first_unit == unit and moment.position > begin.position:
            del calls[inner:]
            calls.append(_Call((path, number), unit))
    return calls


def unit_places(
    model: nn.Module, recording: RecordedPass, stages: int | None = None
) -> tuple[list[str], list[Event]]:
    """The names of the units that `block_costs` would return, and the events between them."""
    borders = _unit_borders(model, recording, stages)
    return _names(model, borders), [moment.event for moment in borders]


def _names(model: nn.Module, borders: Sequence[Moment]) -> list[str]:
    starts = ["", *(moment.event[0] for moment in borders)]
    return [f"{number}: {path or type(model).__name__}" for number, path in enumerate(starts)]


def _unit_borders(model: nn.Module, recording: RecordedPass, stages: int | None) -> list[Moment]:
    depths = _blocks(model, recording)
    wanted = _BLOCKS_PER_STAGE * (stages or 1)
    for depth in sorted({*depths.values()}):
        borders = _borders(recording, {path for path, own in depths.items() if own <= depth})
        if len(borders) + 1 >= wanted:
            break
    if not depths or (stages is not None and len(borders) + 1 < stages):
        borders = _borders(recording, None)
    return borders


def _blocks(model: nn.Module, recording: RecordedPass) -> dict[str, int]:
    """The number of other blocks that each block lies in."""
    order = [moment.event[0] for moment in recording.moments if not moment.event[2]]
    depths = {path: 0 for path, _ in model.named_children()}
    inner: set[str] = set()
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        members = [f"{path}.{name}" if path else name for name, _ in module.named_children()]
        if [called for called in order if called in set(members)] == members:
            depth = sum(path.startswith(f"{around}.") for around in inner)
            depths |= dict.fromkeys(members, depth)
            inner.update(members)
    return depths


def _borders(recording: RecordedPass, blocks: set[str] | None) -> list[Moment]:
    """The beginnings of calls that have functions before them; of several at one position the outermost. None
    is `RecordedPass.enclosed`, or lies between two uses of a buffer that is written to.

    Args:
        blocks: the modules whose calls count; None: all.
    """
    borders: list[Moment] = []
    spans = {span for span in recording.written_spans().values() if span[0] < span[1]}
    last = 0
    for moment in recording.moments:
        path, _, ends = moment.event
        if ends or not path or (blocks is not None and path not in blocks):
            continue
        if not last < moment.position < recording.count or moment.event in recording.enclosed:
            continue
        if not any(first < moment.position <= end for first, end in spans):
            borders.append(moment)
            last = moment.position
    return borders


def _bytes_across(recording: RecordedPass, positions: Sequence[int]) -> list[int]:
    """For each position the bytes of values that are made before it and used from there on."""
    last = dict[int, int]()
    for position, number in recording.uses:
        last[number] = max(last.get(number, -1), position)
    return [
        sum(
            recording.bytes[number]
            for number, end in last.items()
            if recording.producers[number] < position <= end
        )
        for position in positions
    ]
