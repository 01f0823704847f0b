"""The buckets of the moment, with their memory; they change when the order of gradients or the plan does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from partita.ddp.buckets.bucket_layout import BucketLayout, lay_out
from partita.ddp.buckets.reduction import BucketMemory
from partita.ddp.buckets.settings import ReducerSettings
from partita.planning import BucketPlan

__all__ = ["BucketSet"]


class BucketSet:
    """Which bucket each parameter is in.

    Args:
        names: one a parameter.
        order: indices of the parameters, in the order in which their gradients are expected.
        sparse: the names of those whose gradients are sparse.

    Attributes:
        sparse: indices of these.
        layouts: in the order in which they are sent.
        memory: one a bucket; None for a sparse one.
        bucket_of: by parameter index.
        version: counts changes; what was made for another version is out of date.

    Raises:
        PlanError: the settings hold a plan for other parameters.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        order: Sequence[int],
        settings: ReducerSettings,
        sparse: Collection[str] = (),
    ) -> None:
        self.sparse = frozenset(index for index, name in enumerate(names) if name in sparse)
        self._names = names
        self._parameters = parameters
        self._settings = settings
        self.layouts: tuple[BucketLayout, ...] = ()
        self.memory: list[BucketMemory | None] = []
        self.bucket_of: list[int] = []
        self.version = 0
        self.lay_out(order, settings.plan)

    def lay_out(self, order: Sequence[int], plan: BucketPlan | None) -> None:
        """Put the parameters into buckets anew; nothing changes where the buckets would be the same.

        Raises:
            PlanError: a plan for other parameters.
        """
        layouts = lay_out(
            self._names,
            self._parameters,
            order,
            cap_bytes=self._settings.cap_bytes,
            first_cap_bytes=self._settings.first_cap_bytes,
            plan=plan,
            sparse=self.sparse,
        )
        if [set(bucket.names) for bucket in layouts] == [set(bucket.names) for bucket in self.layouts]:
            return
        self.layouts = layouts
        self.bucket_of = [0] * len(self._parameters)
        for bucket in layouts:
            for slot in bucket.slots:
                self.bucket_of[slot.index] = bucket.number
        self.memory = [None if bucket.is_sparse else BucketMemory(bucket) for bucket in layouts]
        self.version += 1
