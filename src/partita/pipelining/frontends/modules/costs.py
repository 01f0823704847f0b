"""What the parts of a model cost that a cut between calls of its modules can divide."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from partita.pipelining.blocks.cut import Event
from partita.pipelining.frontends.modules.recording import Moment, RecordedPass
from partita.planning import CostModel, Unit

__all__ = ["block_costs"]

_BACKWARD = 2.0
"""How much longer a backward pass takes than the forward pass, where nothing better is known."""
_FEW = 2
"""With fewer blocks than this for each stage, what lies in them counts too."""


def block_costs(
    model: nn.Module, recording: RecordedPass, stages: int | None = None
) -> tuple[CostModel, list[Event]]:
    """The units between the beginnings of blocks, with the seconds that the example took.

    A block is a child of the model, or a member of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` that
    the example calls from the first to the last, each once (experts are no blocks: data decides which run).
    Blocks in blocks count where there are few; where these are not enough, any module that is called.

    Returns:
        The cost model, and for each of its borders the event that it lies at.
    """
    depths = _blocks(model, recording)
    wanted = _FEW * (stages or 1)
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
        held = [state[name] for name in names]
        units.append(
            Unit(
                f"{number}: {start.event[0] or type(model).__name__}",
                seconds,
                _BACKWARD * seconds,
                parameter_bytes=sum(value.numel() * value.element_size() for value in held),
                parameters=sum(value.numel() for value in held),
                modules=(start.event[0],),
            )
        )
        start = end
    return CostModel(tuple(units), tuple(bytes_at)), [moment.event for moment in borders]


def _blocks(model: nn.Module, recording: RecordedPass) -> dict[str, int]:
    """In how many other blocks each block lies."""
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
    """Beginnings of calls with something to compute before them; of several at one place the outermost.
    Calls of a module that is called several times are not divided.
    """
    found: list[Moment] = []
    last = 0
    for moment in recording.moments:
        path, _, ends = moment.event
        if ends or not path or (blocks is not None and path not in blocks):
            continue
        if last < moment.position < recording.count:
            found.append(moment)
            last = moment.position
    return found


def _bytes_across(recording: RecordedPass, positions: Sequence[int]) -> list[int]:
    """Bytes of what is made before each position and used from there on."""
    last = dict[int, int]()
    for position, number in recording.uses:
        last[number] = max(last.get(number, -1), position)
    return [
        sum(
            recording.bytes[number]
            for number, end in last.items()
            if recording.made[number] < position <= end
        )
        for position in positions
    ]
