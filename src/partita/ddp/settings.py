"""How gradients are put into buckets and reduced."""

from __future__ import annotations

from dataclasses import dataclass

from partita.ddp.hooks import CommHook
from partita.planning import BucketPlan

__all__ = ["ReducerSettings"]


@dataclass(frozen=True)
class ReducerSettings:
    """What a user has said about it; see `partita.ddp.replicate`."""

    cap_bytes: int
    first_cap_bytes: int
    plan: BucketPlan | None = None
    hook: CommHook | None = None
    check_graphs: bool = True
    late: frozenset[str] = frozenset()
