"""How gradients are put into buckets and reduced."""

from __future__ import annotations

from dataclasses import dataclass

from partita.ddp.buckets.comm_hooks import CommHook
from partita.planning import BucketPlan
from partita.runtime.same_settings import short_digest

__all__ = ["MIB", "ReducerSettings", "describe_plan"]

MIB = 2**20


@dataclass(frozen=True)
class ReducerSettings:
    """What a user has said about it; see `partita.ddp.replicate`.

    Attributes:
        tune: change to planned buckets by itself, after some steps.
    """

    cap_bytes: int
    first_cap_bytes: int
    plan: BucketPlan | None = None
    hook: CommHook | None = None
    check_graphs: bool = False
    late: frozenset[str] = frozenset()
    tune: bool = False

    def common(self) -> dict[str, str]:
        """What has to be the same on every rank: the names of the options, and their values in words."""
        hook = self.hook
        return {
            "bucket_cap_mb": f"{self.cap_bytes / MIB:.4g} ({self.cap_bytes} bytes)",
            "plan": "'measured'" if self.tune else describe_plan(self.plan),
            "comm_hook": "None" if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__),
            "check_graphs": str(self.check_graphs),
        }


def describe_plan(plan: BucketPlan | None) -> str:
    """A few words, equal for plans of equal buckets only."""
    if plan is None:
        return "None"
    return f"{short_digest(repr(plan.buckets), 16)} ({len(plan.buckets)} buckets)"
