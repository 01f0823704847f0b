"""A backward pass in two halves, one right after the other, is one whole backward pass."""

from __future__ import annotations

from collections.abc import Iterable

from partita.planning.schedules.actions import Action, ActionKind

__all__ = ["merge_backward"]


def merge_backward(row: Iterable[Action | None]) -> tuple[Action, ...]:
    """One rank's actions, in order, with B in place of each I that its W follows at once.

    B goes once over the graph, which costs less than I and W. Idle ticks are left out.

    >>> row = [Action.parse(text) for text in ("0I0", "0W0", "0I1", "1F0", "0W1")]
    >>> " ".join(map(str, merge_backward(row)))
    '0B0 0I1 1F0 0W1'
    """
    merged: list[Action] = []
    for action in row:
        if action is None:
            continue
        before = merged[-1] if merged else None
        if action.kind is ActionKind.W and before == Action(action.stage, ActionKind.I, action.microbatch):
            merged[-1] = Action(action.stage, ActionKind.B, action.microbatch)
        else:
            merged.append(action)
    return tuple(merged)
