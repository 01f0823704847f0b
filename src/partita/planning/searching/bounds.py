"""What a plan takes at least, whatever its cuts and its schedule: known without a search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import ceil

from partita.planning.hardware._sizes import write_bytes
from partita.planning.searching.trial import Case

__all__ = ["least_memory_a_rank", "least_ranks", "too_little_memory"]


def least_memory_a_rank(case: Case, *, trains: bool) -> int:
    """What a rank must be able to hold at least where all may hold as much."""
    return max(ceil(_static_bytes(case) / case.cluster.ranks), _largest_run(case, trains)[0])


def least_ranks(case: Case, *, trains: bool) -> int | None:
    """How many ranks like the largest it takes at least; None where no number will do."""
    memory = _largest_memory(case)
    if memory is None:
        return 1
    if _largest_run(case, trains)[0] > memory:
        return None
    return max(ceil(_static_bytes(case) / memory), 1) if memory else 1


def too_little_memory(case: Case, *, trains: bool) -> str | None:
    """Say what can't fit, whatever is tried: what no cut may part, or all parameters together.

    Args:
        case: what is to be planned.
        trains: whether all passes are those of training.
    """
    memory = _largest_memory(case)
    if memory is None:
        return None
    largest, (first, last) = _largest_run(case, trains)
    if largest > memory:
        names = case.costs.units[first].name, case.costs.units[last].name
        one = f"unit {names[0]!r} alone takes {_size(largest)} for one microbatch"
        several = f"units {names[0]!r} to {names[1]!r} take {_size(largest)} together for one microbatch"
        return (
            f"nothing fits: {one if first == last else several}, and no rank may hold more than "
            f"{_size(memory)}"
        )
    static, ranks = _static_bytes(case), case.cluster.ranks
    total = sum(case.cluster.memory(rank) or 0 for rank in range(ranks))
    if static > total:
        enough = f" ({ceil(static / memory)} such ranks have as much)" if memory else ""
        return (
            f"nothing fits: the parameters{_times(case)}, take {_size(static)}, and the {ranks} ranks have "
            f"{_size(total)} together{enough}"
        )
    return None


def _times(case: Case) -> str:
    copies = case.parameter_copies
    return "" if copies == 1 else f", times {copies:g} for gradients and optimizer state"


def _size(size: float) -> str:
    return write_bytes(ceil(size), digits=3)


def _largest_memory(case: Case) -> int | None:
    """What the largest rank may hold; None where one has no limit."""
    memories = [case.cluster.memory(rank) for rank in range(case.cluster.ranks)]
    limits = [memory for memory in memories if memory is not None]
    return max(limits) if len(limits) == len(memories) else None


def _static_bytes(case: Case) -> float:
    size = case.parameter_copies * case.costs.parameter_bytes(0, len(case.costs.units) - 1)
    # A stage's are rounded, by half a byte at most.
    return size if size == int(size) else max(size - len(case.costs.units) / 2, 0.0)


def _largest_run(case: Case, trains: bool) -> tuple[int, tuple[int, int]]:
    """The most bytes of a run of units that no cut may part, and its first and last unit.

    In a training step its parameters are there, and in the backward pass what one of its units kept, or has
    computed again.
    """
    units = case.costs.units
    sizes = []
    for first, last in _runs(case):
        kept = max(unit.activation_bytes for unit in units[first : last + 1]) if trains else 0
        parameters = case.costs.parameter_bytes(first, last)
        sizes.append((round(case.parameter_copies * parameters) + kept, (first, last)))
    return max(sizes, key=lambda size_and_run: size_and_run[0])


def _runs(case: Case) -> Iterator[tuple[int, int]]:
    ends = [-1, *case.costs.allowed_borders, len(case.costs.units) - 1]
    for before, last in pairwise(ends):
        yield before + 1, last
