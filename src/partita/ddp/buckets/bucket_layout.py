"""Which gradients share a bucket, and where each lies in its flat memory.

    bucket 1   [ weight of layer 2 | bias of layer 2 | weight of layer 1 | used used used ]
                                                                           one flag a gradient

The flags travel with the gradients: 1 where this rank has used the parameter, so that after the sum every
rank can tell a parameter that nobody used from one whose gradient is zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from partita.errors import PlanError
from partita.planning import BucketPlan, Cluster, Gradient, plan_buckets

__all__ = ["BucketLayout", "Slot", "lay_out"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one gradient.

    Attributes:
        index: of the parameter.
        name: its qualified name.
        offset: of its first element in the bucket.
        shape: of the parameter.
        strides: those of the parameter where it is dense, else those of a contiguous tensor.
    """

    index: int
    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: gradients of one data type on one device.

    Attributes:
        number: buckets are reduced in this order.
        slots: in the order in which the gradients are expected to get ready.
        elements: of all gradients; the flags come after them.
        is_sparse: of one parameter, whose gradients are sparse: they have some of these elements.
    """

    number: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    elements: int
    is_sparse: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients; of a sparse one, if it had all elements."""
        return self.elements * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(slot.name for slot in self.slots)


def lay_out(
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    order: Sequence[int],
    *,
    cap_bytes: int,
    first_cap_bytes: int | None = None,
    plan: BucketPlan | None = None,
    sparse: Collection[int] = (),
) -> tuple[BucketLayout, ...]:
    """Put every parameter into a bucket.

    Args:
        names: one a parameter.
        order: indices of the parameters, in the order in which their gradients get ready.
        cap_bytes: a bucket is closed as soon as it holds so many bytes.
        first_cap_bytes: the same for the first bucket of each kind.
        plan: names of the parameters of each bucket; the caps are not used then.
        sparse: indices of the parameters whose gradients are sparse. Each has a bucket of its own, and no
            place in a plan.

    Raises:
        PlanError: a plan that misses a parameter, or names one that there is not.
    """
    alone = [[index] for index in order if index in sparse]
    if plan is not None:
        groups = [*_planned(names, parameters, plan, sparse), *alone]
    else:
        place = {index: position for position, index in enumerate(order)}
        dense = {index: at for index, at in place.items() if index not in sparse}
        groups = [*_capped(names, parameters, dense, cap_bytes, first_cap_bytes), *alone]
        groups.sort(key=lambda group: max(place[index] for index in group))
    return tuple(
        _laid(number, group, names, parameters, is_sparse=group[0] in sparse)
        for number, group in enumerate(groups)
    )


def _kind(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _capped(
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    place: Mapping[int, int],
    cap_bytes: int,
    first_cap_bytes: int | None,
) -> list[list[int]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in place:
        kinds.setdefault(_kind(parameters[index]), []).append(index)
    index_of = {name: index for index, name in enumerate(names)}
    groups: list[list[int]] = []
    for members in kinds.values():
        gradients = [
            Gradient(names[i], parameters[i].numel() * parameters[i].element_size(), float(place[i]))
            for i in members
        ]
        buckets = plan_buckets(
            gradients,
            Cluster(ranks=2),
            bucket_cap_bytes=cap_bytes,
            first_bucket_cap_bytes=first_cap_bytes,
        ).buckets
        groups += [[index_of[name] for name in bucket] for bucket in buckets]
    return groups


def _planned(
    names: Sequence[str], parameters: Sequence[torch.Tensor], plan: BucketPlan, sparse: Collection[int]
) -> list[list[int]]:
    index_of = {name: index for index, name in enumerate(names) if index not in sparse}
    planned = [name for bucket in plan.buckets for name in bucket]
    unknown = sorted(set(planned) - index_of.keys())
    if unknown:
        raise PlanError(
            f"the bucket plan names {unknown[0]!r}, which is no trainable parameter of the module with dense "
            "gradients: make the plan from its named_parameters()"
        )
    missing = [name for name in index_of if name not in set(planned)]
    if missing:
        raise PlanError(
            f"the bucket plan leaves out {len(missing)} of {len(index_of)} parameters, {missing[0]!r} among "
            "them: put each into a bucket"
        )
    twice = sorted(name for name, times in Counter(planned).items() if times > 1)
    if twice:
        raise PlanError(f"the bucket plan names {twice[0]!r} twice: put each parameter into one bucket")
    groups = []
    for bucket in plan.buckets:
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for name in bucket:
            kinds.setdefault(_kind(parameters[index_of[name]]), []).append(index_of[name])
        groups += list(kinds.values())
    return groups


def _laid(
    number: int,
    group: Sequence[int],
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    *,
    is_sparse: bool,
) -> BucketLayout:
    slots, offset = [], 0
    for index in group:
        parameter = parameters[index]
        slots.append(Slot(index, names[index], offset, tuple(parameter.shape), _strides(parameter)))
        offset += parameter.numel()
    dtype, device = _kind(parameters[group[0]])
    return BucketLayout(number, dtype, device, tuple(slots), offset, is_sparse)


def _strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Autograd gives a gradient the strides of its parameter where that has no holes; so does this."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(parameter.shape, device="meta").stride()
        expected *= size
    return parameter.stride()
