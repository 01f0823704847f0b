"""Interleaved 1F1B: 1F1B for ranks that have several stages each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.ticks import Rows, laid_out
from partita.planning.generators.one_f_one_b import one_f_one_b
from partita.planning.hardware.placement import loop_placement
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = ["interleaved_1f1b", "interleaved_rows"]


def interleaved_1f1b(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """1F1B in which a rank changes to its next stage after a group of as many microbatches as ranks.

    The bubble is that of 1F1B divided by the number of stages a rank, paid for with as many times the
    messages.

    (D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    2021, section 2.2.) There, the number of microbatches must be a multiple of the number of ranks. Here
    any will do: the groups are made as equal as can be, and the bubble stays the same from as many
    microbatches as ranks on.

    Where the stages do not go round the ranks, with as many on each, there is no such order, and each rank
    takes what can run, as in `one_f_one_b`.

    Args and errors are those of `gpipe`; with one stage a rank this is plain 1F1B.
    """
    stage_ranks = place("Interleaved1F1B", stages, microbatches, ranks, placement)
    rows = interleaved_rows(stage_ranks, microbatches)
    return Schedule("Interleaved1F1B", stage_ranks, microbatches, rows)


def interleaved_rows(stage_ranks: tuple[int, ...], microbatches: int) -> Rows:
    """The rows of the schedule, given the rank of each stage."""
    stages, ranks = len(stage_ranks), max(stage_ranks) + 1
    chunks, rest = divmod(stages, ranks)
    if rest or stage_ranks != loop_placement(stages, ranks):
        return one_f_one_b(stages, microbatches, placement=stage_ranks).rows
    queues = [[_order(rank, ranks, chunks, microbatches)] for rank in range(ranks)]
    return laid_out(queues, ranks * chunks, "Interleaved1F1B")


def _groups(microbatches: int, ranks: int) -> list[range]:
    """The microbatches in groups of at least `ranks` if there are so many, as equal as can be, larger first.

    A group smaller than the number of ranks would leave ranks waiting for the group to come round.
    """
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def _order(rank: int, ranks: int, chunks: int, microbatches: int) -> list[Action]:
    """The actions of one rank."""
    forward, backward = [], []
    for group in _groups(microbatches, ranks):
        for chunk in range(chunks):
            forward += [Action(chunk * ranks + rank, ActionKind.F, number) for number in group]
        for chunk in reversed(range(chunks)):
            backward += [Action(chunk * ranks + rank, ActionKind.B, number) for number in group]
    # With one stage a rank, the way to the end and back is one hop a rank each; with several, a rank also
    # gives the ranks behind it time for their own share of the group, hence the factor of two.
    hops = (ranks - 1 - rank) * (1 if chunks == 1 else 2)
    ahead = min(len(forward), (chunks - 1) * len(_groups(microbatches, ranks)[0]) + hops + 1)
    order = forward[:ahead]
    for index, action in enumerate(backward):
        order.append(action)
        order += forward[ahead + index : ahead + index + 1]
    return order
