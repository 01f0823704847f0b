"""Ranks agree on what they are about to do before any tensor is sent: a mismatch is an error with both sides in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from partita.errors import SignatureMismatch
from partita.pipelining.routes import Routes
from partita.pipelining.stage import PipelineStage
from partita.runtime import Comm

__all__ = ["agree_on_placement", "agree_on_step", "neighbours"]

_TAG = 0
"""Below the tags of values, which start at 1."""


def agree_on_placement(comm: Comm, stages: Iterable[PipelineStage], settings: Mapping[str, object]) -> tuple[int, ...]:
    """The rank of each stage, from what every rank says it holds. Collective.

    Args:
        settings: what must be the same on all ranks (schedule, number of microbatches), by name.

    Raises:
        SignatureMismatch: a stage that nobody or two ranks hold, settings that differ, or stages of different cuts.
    """
    stages = list(stages)
    routes = stages[0].routes
    mine = (tuple(stage.index for stage in stages), dict(settings), _digest(_describe(routes)))
    said = comm.all_gather_object(mine)
    for rank, (_, other, cut) in enumerate(said):
        for name, value in settings.items():
            if other.get(name) != value:
                raise SignatureMismatch(f"{name} is {value!r} on rank {comm.rank} and {other.get(name)!r} on rank {rank}: make them equal")
        if cut != mine[2]:
            raise SignatureMismatch(f"ranks {comm.rank} and {rank} hold stages of different cuts: cut the same model in the same way on both")
    holder: dict[int, int] = {}
    for rank, (indices, _, _) in enumerate(said):
        for index in indices:
            if index in holder:
                raise SignatureMismatch(f"stage {index} is on rank {holder[index]} and on rank {rank}: build each stage once")
            holder[index] = rank
    missing = sorted(set(range(routes.stages)) - set(holder))
    if missing:
        raise SignatureMismatch(f"no rank holds stage {missing[0]}: build all of the {routes.stages} stages, several on a rank if need be")
    return tuple(holder[index] for index in range(routes.stages))


def neighbours(comm: Comm, routes: Routes, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The other ranks that this one exchanges anything with, ascending."""
    found = set()
    for earlier, later in routes.edges:
        ranks = {stage_ranks[earlier], stage_ranks[later]}
        if comm.rank in ranks:
            found |= ranks
    return tuple(sorted(found - {comm.rank}))


def agree_on_step(comm: Comm, peers: Iterable[int], what: str) -> None:
    """Compare with each neighbour what the coming step is: mode, number, microbatches, seed.

    Raises:
        SignatureMismatch: names both ranks and what each of them is about to do.
    """
    mine = torch.tensor([_digest(what)], dtype=torch.int64)
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
                f"rank {comm.rank} is about to run {what}, but rank {peer} {other}: call step() and eval() in the same order with the "
                "same numbers on every rank"
            )


def _describe(routes: Routes) -> str:
    values = "; ".join(value.describe() for value in routes.values.values())
    return f"{routes.borders} {dict(routes.forward)} {dict(routes.backward)} {values}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)
