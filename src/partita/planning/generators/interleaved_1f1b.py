"""Interleaved 1F1B: 1F1B for ranks that have several stages each."""

from __future__ import annotations

from partita.planning.actions import Action, ActionKind
from partita.planning.generators._arguments import chunks_per_rank
from partita.planning.generators._clock import Rows, lay_out
from partita.planning.placement import loop_placement
from partita.planning.schedule import Schedule

__all__ = ["interleaved_1f1b", "interleaved_rows"]


def interleaved_1f1b(stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
    """1F1B in which a rank changes to its next stage after a group of as many microbatches as ranks.

    The bubble is that of 1F1B divided by the number of stages a rank, paid for with as many times the
    messages.

    (D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    2021, section 2.2.) There, the number of microbatches must be a multiple of the number of ranks. Here the
    last group may be smaller; a rank then runs as many more forward passes ahead as it takes that no rank
    waits for ever.

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
    for extra in range(chunks * microbatches + 1):
        queues = [[_order(rank, ranks, chunks, microbatches, extra)] for rank in range(ranks)]
        rows = lay_out(queues, ranks * chunks)
        if rows is not None:
            return rows
    # All forward passes first never stalls: every rank then has the same order.
    raise AssertionError("unreachable: the last attempt runs all forward passes first")


def _order(rank: int, ranks: int, chunks: int, microbatches: int, extra: int) -> list[Action]:
    """The actions of one rank, with `extra` more forward passes ahead of the first backward pass."""
    forward, backward = [], []
    for first in range(0, microbatches, ranks):
        group = range(first, min(first + ranks, microbatches))
        for chunk in range(chunks):
            forward += [Action(chunk * ranks + rank, ActionKind.F, number) for number in group]
        for chunk in reversed(range(chunks)):
            backward += [Action(chunk * ranks + rank, ActionKind.B, number) for number in group]
    # With one stage a rank, the way to the end and back is one hop a rank each; with several, a rank also
    # gives the ranks behind it time for their own share of the group, hence the factor of two.
    hops = (ranks - 1 - rank) * (1 if chunks == 1 else 2)
    ahead = min(len(forward), (chunks - 1) * min(ranks, microbatches) + hops + 1 + extra)
    order = forward[:ahead]
    for index, action in enumerate(backward):
        order.append(action)
        order += forward[ahead + index : ahead + index + 1]
    return order
