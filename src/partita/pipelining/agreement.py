"""Ranks agree on what they are about to do before any tensor is sent: a mismatch is an error with both sides
in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from partita.errors import SignatureMismatch
from partita.pipelining.routes import Routes
from partita.pipelining.stage import PipelineStage
from partita.runtime import Comm

__all__ = ["agree_on_placement", "agree_on_step", "digest", "neighbours"]

_TAG = 0
"""Below the tags of values, which start at 1."""


def agree_on_placement(
    comm: Comm, stages: Iterable[PipelineStage], settings: Mapping[str, object]
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
    mine = (tuple(stage.index for stage in held), dict(settings), digest(routes.describe()))
    said = comm.all_gather_object(mine)
    for rank, (_, other, cut) in enumerate(said):
        for name, value in settings.items():
            if other.get(name) != value:
                raise SignatureMismatch(
                    f"{name} is {value!r} on rank {comm.rank} and {other.get(name)!r} on rank {rank}: make "
                    "them equal"
                )
        if cut != mine[2]:
            raise SignatureMismatch(
                f"ranks {comm.rank} and {rank} hold stages of different cuts: cut the same model in the same "
                "way on both"
            )
    return _placement([indices for indices, _, _ in said], routes.stages)


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


def neighbours(rank: int, routes: Routes, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The other ranks that ``rank`` exchanges anything with, ascending."""
    found = set()
    for earlier, later in routes.edges:
        ranks = {stage_ranks[earlier], stage_ranks[later]}
        if rank in ranks:
            found |= ranks
    return tuple(sorted(found - {rank}))


def agree_on_step(comm: Comm, peers: Iterable[int], what: str) -> None:
    """Compare with each neighbour what the coming step is: step or eval, which one, in which mode.

    Raises:
        SignatureMismatch: names both ranks and what each of them is about to do.
    """
    mine = torch.tensor([digest(what)], dtype=torch.int64)
    peers = tuple(peers)
    theirs = {peer: torch.empty_like(mine) for peer in peers}
    handles = [comm.recv(buffer, peer, _TAG) for peer, buffer in theirs.items()]
    handles += [comm.send(mine, peer, _TAG) for peer in peers]
    for handle in handles:
        handle.wait()
    for peer, buffer in theirs.items():
        if int(buffer) != int(mine):
            comm.send_object(what, peer)
            other = comm.recv_object(peer)
            raise SignatureMismatch(
                f"rank {comm.rank} is about to run {what}, but rank {peer} {other}: call step(), eval() and "
                "train() in the same order on every rank"
            )


def digest(text: str) -> int:
    """A 64-bit number for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
