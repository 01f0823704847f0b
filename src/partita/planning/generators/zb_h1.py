"""ZB-H1: 1F1B whose backward pass is cut in two, so that W fills what would be idle, in 1F1B's memory.

With 4 ranks and 6 microbatches::

    0   F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    1    . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    2    .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    3    .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

(P. Qi et al., "Zero bubble pipeline parallelism", 2023, section 2.1.)
"""

from __future__ import annotations

from collections.abc import Sequence

from partita.planning.generators.making.arguments import place
from partita.planning.generators.making.ticks import forwards, laid_out
from partita.planning.schedules.actions import Action, ActionKind
from partita.planning.schedules.schedule import Schedule

__all__ = ["make_zero_bubble", "zb_h1"]


def zb_h1(
    stages: int, microbatches: int, ranks: int | None = None, placement: Sequence[int] | None = None
) -> Schedule:
    """Stage s runs ahead as in 1F1B, and its W is s microbatches late.

    So each stage holds what the first stage of 1F1B holds. With equal stages and links that take no time the
    step takes ``(p - 1) max(F + I - W, F, I)`` longer than the work: where F = I = W a third
    of 1F1B's bubble.

    Args and errors are those of `gpipe`. Where a rank has several stages, each stage keeps this order of its
    own, and the rank takes whichever can run.
    """
    return make_zero_bubble("ZBH1", 1, stages, microbatches, ranks, placement)


def make_zero_bubble(
    name: str,
    pace: int,
    stages: int,
    microbatches: int,
    ranks: int | None,
    placement: Sequence[int] | None,
) -> Schedule:
    """The schedule whose stages run ahead by `pace` microbatches for each stage after them."""
    stage_ranks = place(name, stages, microbatches, ranks, placement)
    queues: list[list[list[Action]]] = [[] for _ in range(max(stage_ranks) + 1)]
    for stage, rank in enumerate(stage_ranks):
        queues[rank].append(_order(stage, pace * (stages - 1 - stage), pace * stage, microbatches))
    return Schedule(name, stage_ranks, microbatches, laid_out(queues, stages, name))


def _order(stage: int, ahead: int, late: int, microbatches: int) -> list[Action]:
    forward = forwards(stage, microbatches)
    weight = [Action(stage, ActionKind.W, number) for number in range(microbatches)]
    order = forward[:ahead]
    for number in range(microbatches):
        order += forward[ahead + number : ahead + number + 1]
        order.append(Action(stage, ActionKind.I, number))
        if number >= late:
            order.append(weight[number - late])
    return order + weight[max(microbatches - late, 0) :]
