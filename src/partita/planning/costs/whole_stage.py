"""Write into a row of a schedule what concerns a whole stage: when its parameters are gathered and freed, and
when its gradients are summed over its replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from partita.planning._check import require_count
from partita.planning.schedules.actions import Action, ActionKind

__all__ = ["with_reduce_grad", "with_unshard"]

_LAST_OF_A_MICROBATCH = (ActionKind.B, ActionKind.W)


def with_unshard(row: Iterable[Action | None], most: int = 3) -> tuple[Action, ...]:
    """One rank's actions, in order, with UNSHARD before a stage is used and RESHARD once it is not.

    Ahead of each action the next ``most`` different stages are gathered, so that one is being gathered while
    another computes; the others are freed. With ``most=1``::

        0F0 1F0 1B0 0B0   ->   0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD

    Args:
        row: actions that compute; idle ticks are left out.
        most: how many stages are gathered at once; one more where two run together.
    """
    require_count(most, "most")
    actions = [action for action in row if action is not None]
    written: list[Action] = []
    gathered: list[int] = []
    for position, action in enumerate(actions):
        soon = _next_stages(actions[position:], most)
        for stage in [stage for stage in gathered if stage not in soon]:
            gathered.remove(stage)
            written.append(Action(stage, ActionKind.RESHARD))
        for stage in [stage for stage in soon if stage not in gathered]:
            gathered.append(stage)
            written.append(Action(stage, ActionKind.UNSHARD))
        written.append(action)
    return (*written, *(Action(stage, ActionKind.RESHARD) for stage in gathered))


def _next_stages(actions: Sequence[Action], most: int) -> list[int]:
    stages: dict[int, None] = {}
    for action in actions:
        if len(stages) >= most:
            break
        stages.update(dict.fromkeys(part.stage for part in action.passes))
    return list(stages)


def with_reduce_grad(row: Iterable[Action | None], microbatches: int) -> tuple[Action, ...]:
    """One rank's actions, in order, with REDUCE_GRAD right after a stage's last backward pass.

    >>> row = [Action.parse(text) for text in ("0F0", "0F1", "0B0", "0I1", "0W1")]
    >>> " ".join(map(str, with_reduce_grad(row, microbatches=2)))
    '0F0 0F1 0B0 0I1 0W1 0REDUCE_GRAD'

    Args:
        row: its idle ticks are left out.
        microbatches: how many a step has; a stage with fewer backward passes gets none.
    """
    require_count(microbatches, "microbatches")
    passes: Counter[int] = Counter()
    actions: list[Action] = []
    for action in row:
        if action is None:
            continue
        actions.append(action)
        for part in action.passes:
            if part.kind in _LAST_OF_A_MICROBATCH:
                passes[part.stage] += 1
                if passes[part.stage] == microbatches:
                    actions.append(Action(part.stage, ActionKind.REDUCE_GRAD))
    return tuple(actions)
