"""The costs of the blocks of a model that is cut between calls of its modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from partita.pipelining.blocks.cut import Event
from partita.pipelining.frontends.modules.recording import Moment, RecordedPass
from partita.planning import CostModel, Unit

__all__ = ["block_costs"]

_BACKWARD = 2.0
"""How much longer the backward pass of a block is assumed to take than its forward pass."""
_BLOCKS_PER_STAGE = 2
"""With fewer blocks for each stage than this, blocks within blocks count too."""


def block_costs(
    model: nn.Module, recording: RecordedPass, stages: int | None = None
) -> tuple[CostModel, list[Event]]:
    """Return the units between the beginnings of blocks, with the seconds that the example took.

    A block is a child of the model, or a member of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` that
    the example calls from the first to the last, each once (experts are no blocks: data decides which run).
    Where blocks are few, those within blocks count too; where these are not enough, any module that is
    called.

    Returns:
        The cost model, and for each of its borders the event at which it lies.
    """
    depths = _blocks(model, recording)
    wanted = _BLOCKS_PER_STAGE * (stages or 1)
    for depth in sorted({*depths.values()}):
        borders = _borders(recording, {path for path, own in depths.items() if own <= depth})
        if len(borders) + 1 >= wanted:
            break
    if not depths or (stages is not None and len(borders) + 1 < stages):
        borders = _borders(recording, None)
    bytes_at = _bytes_across(recording, [moment.position for moment in borders])
    state = dict(model.named_parameters())
    seen: set[str] = set()
    units = []
    ends = [*borders, Moment(("", 0, True), recording.count, recording.seconds)]
    start = Moment(("", 0, False), 0, 0.0)
    for number, end in enumerate(ends):
        names = {
            name
            for position, name in recording.state_uses
            if start.position <= position < end.position and name in state
        } - seen
        seen |= names
        seconds = max(end.seconds - start.seconds, 0.0)
        parameters = [state[name] for name in names]
        units.append(
            Unit(
                f"{number}: {start.event[0] or type(model).__name__}",
                seconds,
                _BACKWARD * seconds,
                parameter_bytes=sum(value.numel() * value.element_size() for value in parameters),
                parameters=sum(value.numel() for value in parameters),
                modules=(start.event[0],),
            )
        )
        start = end
    return CostModel(tuple(units), tuple(bytes_at)), [moment.event for moment in borders]


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
    """The beginnings of calls that have functions before them; of several at one position the outermost.

    Args:
        blocks: the modules whose calls count; None: all.
    """
    borders: list[Moment] = []
    last = 0
    for moment in recording.moments:
        path, _, ends = moment.event
        if ends or not path or (blocks is not None and path not in blocks):
            continue
        if last < moment.position < recording.count:
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
