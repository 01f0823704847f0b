"""A schedule as data: for each rank, the list of its actions."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from partita.errors import ScheduleError
from partita.planning import _json
from partita.planning._check import require_count
from partita.planning.schedules.actions import Action, ActionKind

__all__ = ["Schedule"]


@dataclass(frozen=True)
class _Text:
    """A schedule as it stands in JSON: actions as text, idle cells as empty text."""

    name: str
    stage_ranks: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in order. Simulator, validator, report and executor read the same object.

    Attributes:
        name: as `get_schedule` takes it, or any other text.
        stage_ranks: the rank of each stage.
        microbatches: how many a step has.
        rows: one row a rank. None is a tick in which the rank idles; it carries no meaning beyond the
            picture.

    Raises:
        ScheduleError: not one row a rank, or a stage on a rank that does not exist.

    >>> text = "0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1\\n"
    >>> schedule = Schedule.from_csv(text, name="mine")
    >>> schedule.stages, schedule.microbatches, schedule.in_flight()
    (2, 2, (2, 1))
    """

    name: str
    stage_ranks: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[Action | None, ...], ...]

    def __post_init__(self) -> None:
        require_count(len(self.stage_ranks), "the number of stages")
        require_count(self.microbatches, "microbatches")
        for stage, rank in enumerate(self.stage_ranks):
            if not 0 <= rank < len(self.rows):
                raise ScheduleError(
                    f"stage {stage} is on rank {rank}, but there are {len(self.rows)} rows: give one a rank"
                )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.stage_ranks)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """What `rank` does, in order, without the idle ticks."""
        return tuple(action for action in self.rows[rank] if action is not None)

    @cached_property
    def is_lowered(self) -> bool:
        """Whether sends and receives are written out."""
        return any(action is not None and action.is_communication for row in self.rows for action in row)

    @cached_property
    def has_backward(self) -> bool:
        """Whether any backward pass is in it."""
        return any(part.kind is not ActionKind.F for _, part in self.passes())

    def passes(self) -> Iterator[tuple[int, Action]]:
        """Every F, I, W and B with its rank, rank by rank in order; an OVERLAP_F_B part by part."""
        for rank, row in enumerate(self.rows):
            for action in row:
                if action is not None:
                    for part in action.passes:
                        yield rank, part

    def in_flight(self) -> tuple[int, ...]:
        """For each stage, the most microbatches that it holds at once (all 0 without a backward pass)."""
        return self._in_flight

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        if not self.has_backward:
            return (0,) * self.stages
        current, most = [0] * self.stages, [0] * self.stages
        for _, part in self.passes():
            if part.kind is ActionKind.F:
                current[part.stage] += 1
                most[part.stage] = max(most[part.stage], current[part.stage])
            elif part.kind is not ActionKind.I:
                current[part.stage] -= 1
        return tuple(most)

    def compute_only(self) -> Schedule:
        """The schedule with its compute actions alone, and without idle ticks where it had communication."""
        if not any(action is not None and not action.is_compute for row in self.rows for action in row):
            return self
        return self._with_rows(lambda action: action is not None and action.is_compute)

    def without_idle(self) -> Schedule:
        """The schedule without its idle ticks."""
        return self._with_rows(lambda action: action is not None)

    def _with_rows(self, keep: Callable[[Action | None], bool]) -> Schedule:
        rows = tuple(tuple(filter(keep, row)) for row in self.rows)
        return Schedule(self.name, self.stage_ranks, self.microbatches, rows)

    def to_csv(self) -> str:
        """One line a rank, one cell an action, empty where the rank idles: the layout of torch's files."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([["" if action is None else str(action) for action in row] for row in self.rows])
        return out.getvalue()

    @classmethod
    def from_csv(
        cls,
        text: str,
        *,
        name: str = "CSV",
        stage_ranks: Sequence[int] | None = None,
        microbatches: int | None = None,
    ) -> Schedule:
        """Read one line a rank, as `to_csv` and torch's pipelining write it.

        Args:
            text: the whole file.
            name: what to call the schedule; the file does not say.
            stage_ranks: the rank of each stage; found from the lines where it is not given.
            microbatches: how many there are; one more than the largest in the file where it is not given.

        Raises:
            ScheduleError: no action, a cell that is none, a stage in two lines, or a stage that is in none.
        """
        try:
            lines = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise ScheduleError(
                f"this is not CSV ({error}): give one line a rank, with actions such as 2F0 between commas"
            ) from error
        rows = tuple(
            tuple(_parse_cell(cell, rank, position) for position, cell in enumerate(line))
            for rank, line in enumerate(lines)
        )
        if not any(action for row in rows for action in row):
            raise ScheduleError(
                "this CSV has no actions: give one line a rank, with actions such as 2F0 between commas"
            )
        if stage_ranks is None:
            stage_ranks = _find_stage_ranks(rows)
        if microbatches is None:
            numbers = [part.microbatch for row in rows for action in row if action for part in action.passes]
            microbatches = 1 + max((number for number in numbers if number is not None), default=0)
        return cls(name, tuple(stage_ranks), microbatches, rows)

    def to_json(self) -> str:
        """JSON text that `from_json` reads back into an equal schedule."""
        rows = tuple(tuple("" if action is None else str(action) for action in row) for row in self.rows)
        return _json.write(_Text(self.name, self.stage_ranks, self.microbatches, rows), "partita.schedule")

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what `to_json` wrote; PlanError says where the text is wrong."""
        read = _json.read(text, _Text, "partita.schedule")
        rows = tuple(
            tuple(_parse_cell(cell, rank, position) for position, cell in enumerate(row))
            for rank, row in enumerate(read.rows)
        )
        return cls(read.name, read.stage_ranks, read.microbatches, rows)


def _parse_cell(cell: str, rank: int, position: int) -> Action | None:
    if not cell.strip():
        return None
    try:
        return Action.parse(cell)
    except ScheduleError as error:
        raise ScheduleError(f"rank {rank}, position {position}: {error}") from error


def _find_stage_ranks(rows: tuple[tuple[Action | None, ...], ...]) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in () if action is None else action.passes or (action,):
                if ranks.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"stage {part.stage} is on rank {ranks[part.stage]} and on rank {rank} ({part}): "
                        "keep all of its actions on one line"
                    )
    missing = next((stage for stage in range(max(len(ranks), 1)) if stage not in ranks), None)
    if missing is not None:
        raise ScheduleError(
            f"stage {missing} has no action, and stage {max(ranks, default=missing)} is the last: number the "
            "stages from 0 without a gap; in Python, stage_ranks says where a stage without actions is"
        )
    return tuple(ranks[stage] for stage in range(len(ranks)))
