"""Interleaved 1F1B: 1F1B for ranks that have several stages each."""

from __future__ import annotations

from itertools import pairwise

from partita.planning.actions import Action, ActionKind
from partita.planning.generators._arguments import chunks_per_rank
from partita.planning.generators._clock import Rows, laid_out
from partita.planning.placement import loop_placement
from partita.planning.schedule import Schedule

__all__ = ["interleaved_1f1b", "interleaved_rows"]


def interleaved_1f1b(stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
    """1F1B in which a rank changes to its next stage after a group of as many microbatches as ranks.

    The bubble is that of 1F1B divided by the number of stages a rank, paid for with as many times the
    messages.

    (D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    2021, section 2.2.) There, the number of microbatches must be a multiple of the number of ranks. Here
    any will do: the groups are made as equal as can be, and the bubble stays the same from as many
    microbatches as ranks on.

    Args:
        stages: how many stages there are, a multiple of `ranks`; they go round the ranks.
        microbatches: how many a step has.
        ranks: how many ranks there are; as many as stages where it is not given, which is plain 1F1B.

    Raises:
        ScheduleError: a number below 1, or stages that are no multiple of the ranks.
    """
    ranks, chunks = chunks_per_rank("Interleaved1F1B", stages, microbatches, ranks)
    rows = interleaved_rows(ranks, chunks, microbatches)
    return Schedule("Interleaved1F1B", loop_placement(stages, ranks), microbatches, rows)


def interleaved_rows(ranks: int, chunks: int, microbatches: int) -> Rows:
    """The rows of the schedule: `chunks` stages on each rank."""
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
