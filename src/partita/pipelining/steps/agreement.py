"""Ranks agree on what they are about to do before any tensor is sent: a mismatch is an error with both sides
in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from partita.errors import SignatureMismatch
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.stage import Stage
from partita.runtime import Comm, wait_all
from partita.runtime.same_settings import digest, refuse_differences

__all__ = ["Relay", "agree_on_placement", "agree_on_step", "neighbours", "rank_pairs"]

_TAG = 0
"""Below the tags of values, which start at 1."""


def agree_on_placement(
    comm: Comm, stages: Iterable[Stage], settings: Mapping[str, object]
) -> tuple[int, ...]:
    """The rank of each stage, from what every rank says it holds. Collective.

    Args:
        settings: what must be the same on all ranks (schedule, number of microbatches), by name.

    Raises:
        SignatureMismatch: a stage that nobody or two ranks hold, settings that differ, or stages of different
        cuts.
    """
    held = list(stages)
    routes = held[0].routes
    mine = (
        tuple(stage.index for stage in held),
        {name: repr(value) for name, value in settings.items()},
        digest(routes.describe()),
        digest("\n".join(routes.structure)),
    )
    said = comm.all_gather_object(mine)
    refuse_differences([others for _, others, _, _ in said])
    if any(model != said[0][3] for *_, model in said):
        _refuse_models(comm.all_gather_object(routes.structure))
    for rank, (_, _, cut, _) in enumerate(said):
        if cut != said[0][2]:
            raise SignatureMismatch(
                f"ranks 0 and {rank} hold stages of different cuts: cut the same model in the same way "
                "on both"
            )
    return _placement([indices for indices, *_ in said], routes.stages)


def _refuse_models(structures: Sequence[tuple[str, ...]]) -> None:
    """Names the first line in which two of them differ."""
    for rank, structure in enumerate(structures):
        if structure == structures[0]:
            continue
        here, there = next(
            pair for pair in zip_longest(structures[0], structure, fillvalue="nothing") if pair[0] != pair[1]
        )
        raise SignatureMismatch(
            f"ranks 0 and {rank} have cut different models: {here} on rank 0, and {there} on rank {rank}. "
            "Build the same model on every rank"
        )


def _placement(held: Sequence[tuple[int, ...]], stages: int) -> tuple[int, ...]:
    """The rank of each stage, from the stages of each rank."""
    holder: dict[int, int] = {}
    for rank, indices in enumerate(held):
        for index in indices:
            if index in holder:
                raise SignatureMismatch(
                    f"stage {index} is on rank {holder[index]} and on rank {rank}: build each stage once"
                )
            holder[index] = rank
    missing = sorted(set(range(stages)) - set(holder))
    if missing:
        raise SignatureMismatch(
            f"no rank holds stage {missing[0]}: build all of the {stages} stages, several on a rank if need "
            "be"
        )
    return tuple(holder[index] for index in range(stages))


def rank_pairs(routes: Routes, stage_ranks: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """The pairs (lower, higher) of ranks that exchange anything.

    Where sizes are open, every rank hears of them from a neighbour, so a rank without any gets the first
    stage's.
    """
    ends = {(stage_ranks[a], stage_ranks[b]) for mode in routes.modes for a, b in mode.edges}
    found = {(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]}
    if any(mode.symbols for mode in routes.modes):
        root, reached = stage_ranks[0], set(_parents(found, stage_ranks[0]))
        found |= {(min(root, rank), max(root, rank)) for rank in set(stage_ranks) - reached - {root}}
    return frozenset(found)


def neighbours(rank: int, routes: Routes, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The other ranks that ``rank`` exchanges anything with, ascending."""
    return tuple(
        sorted({other for pair in rank_pairs(routes, stage_ranks) if rank in pair for other in pair} - {rank})
    )


@dataclass(frozen=True, slots=True)
class Relay:
    """How numbers that only the first stage's rank knows reach all others: from neighbour to neighbour, along
    a tree.

    Attributes:
        parent: who tells this rank; None on the rank that knows.
        children: whom it tells.
        length: how many numbers there are, in either mode.
    """

    parent: int | None
    children: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, rank: int, routes: Routes, stage_ranks: tuple[int, ...], microbatches: int) -> Relay | None:
        """This rank's place; None where no size is open, so that there is nothing to tell."""
        open_sizes = max(len(mode.symbols) for mode in routes.modes)
        if not open_sizes and not routes.bundled:
            return None
        parents = _parents(rank_pairs(routes, stage_ranks), stage_ranks[0])
        children = tuple(child for child, parent in parents.items() if parent == rank)
        return cls(parents.get(rank), children, microbatches * (open_sizes + 1))


def _parents(pairs: Iterable[tuple[int, int]], root: int) -> dict[int, int]:
    """For each rank that can be reached from ``root`` the one before it on a shortest way."""
    others: dict[int, list[int]] = {}
    for low, high in sorted(pairs):
        others.setdefault(low, []).append(high)
        others.setdefault(high, []).append(low)
    parents: dict[int, int] = {}
    ahead = [root]
    for rank in ahead:
        for other in others.get(rank, ()):
            if other != root and other not in parents:
                parents[other] = rank
                ahead.append(other)
    return parents


def agree_on_step(
    comm: Comm, peers: Iterable[int], what: str, relay: Relay | None = None, numbers: Sequence[int] = ()
) -> tuple[int, ...]:
    """Compare with each neighbour what the coming step is (step or eval, which one, in which mode), and hand
    on the numbers that go with it.

    ::

        rank 0   digest, numbers -->  rank 1   digest, numbers -->  rank 2
                 <-- digest                    <-- digest

    Args:
        relay: see `Relay`; None: there are no numbers.
        numbers: on the rank that knows them.

    Returns:
        The numbers, on every rank.

    Raises:
        SignatureMismatch: names both ranks and what each of them is about to do.
    """
    number = digest(what)
    mine = torch.tensor([number], dtype=torch.int64)
    peers = tuple(peers)
    parent, children = (None, ()) if relay is None else (relay.parent, relay.children)
    length = 0 if relay is None else relay.length
    theirs = {peer: torch.empty(1 + length * (peer == parent), dtype=torch.int64) for peer in peers}
    received = {peer: comm.recv(buffer, peer, _TAG) for peer, buffer in theirs.items()}
    handles = [comm.send(mine, peer, _TAG) for peer in peers if peer not in children]
    if parent is not None:
        received.pop(parent).wait()
        numbers = theirs[parent][1:].tolist()
    if children:
        padding = [0] * (length - len(numbers))
        message = torch.tensor([number, *numbers, *padding], dtype=torch.int64)
        handles += [comm.send(message, child, _TAG) for child in children]
    wait_all([*received.values(), *handles])
    for peer, buffer in theirs.items():
        if buffer[0].item() != number:
            comm.send_object(what, peer)
            other = comm.recv_object(peer)
            raise SignatureMismatch(
                f"rank {comm.rank} is about to run {what}, but rank {peer} {other}: call step(), eval() and "
                "train() in the same order on every rank"
            )
    return tuple(numbers)
