"""DualPipeV: a V of stages in which a forward pass and a backward pass run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partita.errors import ScheduleError
from partita.planning.generators.making.arguments import place_in_v
from partita.planning.generators.making.ticks import laid_out
from partita.planning.schedules.actions import Action, ActionKind, overlap
from partita.planning.schedules.schedule import Schedule

__all__ = ["dualpipe_v"]


def dualpipe_v(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Rank r holds stages r (near) and ``2 * ranks - 1 - r`` (far), and runs passes of the two together.

    In the steady state a rank runs a forward pass of one stage together with a backward pass of the other, so
    that the communication inside one hides behind the computation of the other. The backward pass is cut into
    I and W only where the pipeline fills and drains.

    (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.2.1, DualPipe; cut in half to a V by P. Qi
    and others at Sea AI Lab, 2025.)

    Args:
        stages: how many stages there are: two a rank.
        microbatches: how many a step has, at least as many as stages.
        ranks: how many ranks there are; half the stages where it is not given.
        placement: the rank of each stage; only this V will do.

    Raises:
        ScheduleError: not two stages a rank, another placement, or fewer microbatches than stages.
    """
    stage_ranks = place_in_v("DualPipeV", stages, microbatches, ranks, placement)
    ranks = stages // 2
    if microbatches < stages:
        raise ScheduleError(
            f"DualPipeV with {microbatches} microbatches on {stages} stages: give at least {stages}, or "
            "take 1F1B"
        )
    queues = [[list(_Rank(rank, ranks, microbatches).order())] for rank in range(ranks)]
    return Schedule("DualPipeV", stage_ranks, microbatches, laid_out(queues, stages, "DualPipeV"))


class _Rank:
    """Counts how far one rank has come with each kind of pass of its two stages."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self._behind = ranks - 1 - rank  # how many ranks lie between this one and the turn of the V
        self._ahead = rank + 1
        self._steady = microbatches - 2 * ranks + rank + 1
        self._near, self._far = rank, 2 * ranks - 1 - rank
        self._counts: dict[tuple[int, ActionKind], int] = {}
        self._late: list[Action] = []

    def order(self) -> Iterator[Action]:
        """Every action of the rank, in order."""
        yield from self._fill()
        yield from self._run_steady()
        yield from self._drain()

    def _fill(self) -> Iterator[Action]:
        near, far = self._near, self._far
        for _ in range(2 * self._behind):
            yield self._forward(near)
        for _ in range(self._ahead):
            yield self._forward(near)
            yield self._forward(far)
        for _ in range(self._behind):
            yield self._input(far)
            yield self._late.pop(0)
            yield self._forward(far)

    def _run_steady(self) -> Iterator[Action]:
        near, far = self._near, self._far
        for turn in range(self._steady):
            if turn == 0 and self._behind == 0:
                # The turn of the V: what this forward pass makes is what the rank's own far stage takes next,
                # so there is nothing to hide; the two passes run one after the other.
                yield self._forward(near)
                yield self._backward(far)
            else:
                yield overlap(self._forward(near), self._backward(far))
            yield overlap(self._forward(far), self._backward(near))
        for _ in range(self._behind):
            yield self._backward(far)
            yield overlap(self._forward(far), self._backward(near))

    def _drain(self) -> Iterator[Action]:
        near, far = self._near, self._far
        for turn in range(self._ahead):
            # The second half leaves its weights for later, when the ranks before this one have nothing else
            # to do.
            halve = turn >= self._ahead // 2
            odd_start = halve and turn == self._ahead // 2 and self._ahead % 2 == 1
            yield self._input(far) if halve and not odd_start else self._backward(far)
            yield self._input(near) if halve else self._backward(near)
        for _ in range(self._behind):
            yield self._late.pop(0)
            yield self._input(near)
        yield from self._late

    def _next(self, stage: int, kind: ActionKind) -> int:
        done_as = ActionKind.F if kind is ActionKind.F else ActionKind.B
        number = self._counts.get((stage, done_as), 0)
        self._counts[stage, done_as] = number + 1
        return number

    def _forward(self, stage: int) -> Action:
        return Action(stage, ActionKind.F, self._next(stage, ActionKind.F))

    def _backward(self, stage: int) -> Action:
        return Action(stage, ActionKind.B, self._next(stage, ActionKind.B))

    def _input(self, stage: int) -> Action:
        microbatch = self._next(stage, ActionKind.I)
        self._late.append(Action(stage, ActionKind.W, microbatch))
        return Action(stage, ActionKind.I, microbatch)
