"""Ranks compare what they are about to do before any tensor is sent; an error about a mismatch shows both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch

from partita.errors import SignatureMismatch
from partita.pipelining.interface.routes import Routes
from partita.pipelining.stages.stage import Stage
from partita.pipelining.steps.preparing.trained_alike import TrainedAlike
from partita.runtime import Comm, wait_all
from partita.runtime.same_settings import digest, refuse_differences

__all__ = ["BatchSizes", "Relay", "StepAgreement", "agree_on_placement", "neighbours", "rank_pairs"]

_TAG = 0
"""Below the tags of values, which start at 1."""

_places: WeakKeyDictionary[Comm, int] = WeakKeyDictionary()
"""How many schedules have been made on each comm."""


def agree_on_placement(
    comm: Comm, stages: Iterable[Stage], settings: Mapping[str, object]
) -> tuple[int, ...]:
    """The rank of each stage, from the stages of all ranks. Collective.

    Args:
        settings: what must be the same on all ranks (schedule, number of microbatches), by name.

    Raises:
        SignatureMismatch: a stage that no rank or two ranks have, settings that differ, or stages of
            different cuts.
    """
    own_stages = list(stages)
    routes = own_stages[0].routes
    mine = (
        tuple(stage.index for stage in own_stages),
        {name: repr(value) for name, value in settings.items()},
        digest(routes.describe()),
        digest("\n".join(routes.structure)),
    )
    everywhere = comm.all_gather_object(mine)
    refuse_differences([others for _, others, _, _ in everywhere])
    if any(model != everywhere[0][3] for *_, model in everywhere):
        _refuse_models(comm.all_gather_object(routes.structure))
    for rank, (_, _, cut, _) in enumerate(everywhere):
        if cut != everywhere[0][2]:
            raise SignatureMismatch(
                f"ranks 0 and {rank} hold stages of different cuts: cut the same model in the same way "
                "on both"
            )
    return _placement([indices for indices, *_ in everywhere], routes.stages)


_OF_A_SET = (
    ". Where its code goes through a set of strings, start all processes with PYTHONHASHSEED=0: their order "
    "is another one in each"
)


def _refuse_models(structures: Sequence[tuple[str, ...]]) -> None:
    """Raise an error with the first line in which two models differ."""
    for rank, structure in enumerate(structures):
        if structure == structures[0]:
            continue
        here, there = next(
            pair for pair in zip_longest(structures[0], structure, fillvalue="nothing") if pair[0] != pair[1]
        )
        calls = here.startswith("%") and there.startswith("%")
        raise SignatureMismatch(
            f"ranks 0 and {rank} have cut different models: {here} on rank 0, and {there} on rank {rank}. "
            f"Build the same model on every rank{_OF_A_SET if calls else ''}"
        )


def _placement(stages_of_ranks: Sequence[tuple[int, ...]], stages: int) -> tuple[int, ...]:
    holder: dict[int, int] = {}
    for rank, indices in enumerate(stages_of_ranks):
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

    Where sizes are open, every rank gets them from a neighbour. A rank that would have none is made a
    neighbour of the first stage's rank.
    """
    ends = {(stage_ranks[a], stage_ranks[b]) for mode in routes.modes for a, b in mode.edges}
    pairs = {(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]}
    if any(mode.symbols for mode in routes.modes):
        root, reached = stage_ranks[0], set(_parents(pairs, stage_ranks[0]))
        pairs |= {(min(root, rank), max(root, rank)) for rank in set(stage_ranks) - reached - {root}}
    return frozenset(pairs)


def neighbours(rank: int, routes: Routes, stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The other ranks that ``rank`` exchanges anything with, ascending."""
    return tuple(
        sorted({other for pair in rank_pairs(routes, stage_ranks) if rank in pair for other in pair} - {rank})
    )


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The sizes of a step's microbatches, which the rank of the first stage sends to the others.

    Attributes:
        samples: how many samples each has; empty where this rank does not know.
        open: for each the sizes that the model leaves open, in the order of ``Routes.symbols``.
    """

    samples: tuple[int, ...] = ()
    open: tuple[tuple[int, ...], ...] = ()

    def numbers(self) -> list[int]:
        """The numbers that are sent: those of one microbatch after the other.

        >>> BatchSizes((2, 1), ((7,), (5,))).numbers()
        [2, 7, 1, 5]
        """
        return [
            number
            for samples, sizes in zip(self.samples, self.open, strict=True)
            for number in (samples, *sizes)
        ]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int], microbatches: int, symbols: int) -> BatchSizes:
        """From the numbers that were received; further ones are ignored.

        >>> BatchSizes.of_numbers([2, 7, 1, 5, 0, 0], microbatches=2, symbols=1)
        BatchSizes(samples=(2, 1), open=((7,), (5,)))
        """
        width = 1 + symbols
        parts = [tuple(numbers[start : start + width]) for start in range(0, microbatches * width, width)]
        return cls(tuple(part[0] for part in parts), tuple(part[1:] for part in parts))


@dataclass(frozen=True, slots=True)
class Relay:
    """The way of `BatchSizes` from the first stage's rank to all others: along a tree of neighbours.

    Attributes:
        parent: the rank that sends them to this one; None on the first stage's rank.
        children: the ranks that this one sends them to.
        microbatches: how many there are.
        length: how many numbers are sent, in either mode.
    """

    parent: int | None
    children: tuple[int, ...]
    microbatches: int
    length: int

    @classmethod
    def of(cls, rank: int, routes: Routes, stage_ranks: tuple[int, ...], microbatches: int) -> Relay | None:
        """This rank's place; None where no size is open, so that there is nothing to send."""
        open_sizes = max(len(mode.symbols) for mode in routes.modes)
        if not open_sizes and not routes.bundled:
            return None
        parents = _parents(rank_pairs(routes, stage_ranks), stage_ranks[0])
        children = tuple(child for child, parent in parents.items() if parent == rank)
        return cls(parents.get(rank), children, microbatches, microbatches * (open_sizes + 1))


def _parents(pairs: Iterable[tuple[int, int]], root: int) -> dict[int, int]:
    """For each rank that can be reached from ``root``, the one before it on a shortest path."""
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


class StepAgreement:
    """Compares with neighbours, before each step, what the ranks are about to do.

    Args:
        routes: of both modes.
        stage_ranks: the rank of each stage.
        microbatches: how many a step has.
        stages: those of this rank.
    """

    def __init__(
        self,
        comm: Comm,
        routes: Routes,
        stage_ranks: tuple[int, ...],
        microbatches: int,
        stages: Iterable[Stage] = (),
    ) -> None:
        self._comm = comm
        self._trained = TrainedAlike(stages)
        self._peers = neighbours(comm.rank, routes, stage_ranks)
        self._relay = Relay.of(comm.rank, routes, stage_ranks, microbatches)
        place = _places[comm] = _places.get(comm, 0) + 1
        self.of_schedule = f" of schedule {place}" if place > 1 else ""
        """Which of several schedules on one comm this is, for messages; empty for the first."""

    def agree(
        self, what: str, sizes: BatchSizes | None = None, symbols: int = 0, *, train: bool = False
    ) -> BatchSizes:
        """Compare with each neighbour what the coming step is (step or eval, its number, the mode), and pass
        its sizes on. Collective.

        ::

            rank 0   digest, training, sizes -->  rank 1   digest, training, sizes -->  rank 2
                     <-- digest, training                  <-- digest, training

        Args:
            sizes: on the rank that knows them.
            symbols: how many sizes are open.
            train: compare what `TrainedAlike` knows, too.

        Returns:
            The sizes: on every rank where some are open, else on the rank that knows them.

        Raises:
            SignatureMismatch: names both ranks and what each of them is about to do.
        """
        comm, relay, number = self._comm, self._relay, digest(what)
        parent, children = (None, ()) if relay is None else (relay.parent, relay.children)
        length = 0 if relay is None else relay.length
        training = self._trained.numbers() if train else (0, 0)
        theirs = {peer: torch.empty(3 + length * (peer == parent), dtype=torch.int64) for peer in self._peers}
        received = {peer: comm.recv(buffer, peer, _TAG) for peer, buffer in theirs.items()}
        mine = torch.tensor([number, *training], dtype=torch.int64)
        handles = [comm.send(mine, peer, _TAG) for peer in self._peers if peer not in children]
        if relay is not None and parent is not None:
            received.pop(parent).wait()
            sizes = BatchSizes.of_numbers(theirs[parent][3:].tolist(), relay.microbatches, symbols)
        sizes = sizes or BatchSizes()
        if children:
            numbers = sizes.numbers()
            padding = [0] * (length - len(numbers))
            message = torch.tensor([number, *training, *numbers, *padding], dtype=torch.int64)
            handles += [comm.send(message, child, _TAG) for child in children]
        wait_all([*received.values(), *handles])
        for peer, buffer in theirs.items():
            if buffer[0].item() != number:
                comm.send_object(what, peer)
                other = comm.recv_object(peer)
                raise SignatureMismatch(
                    f"rank {comm.rank} is about to run {what}, but rank {peer} {other}: call step(), eval() "
                    "and train() in the same order on every rank"
                )
            if train:
                self._trained.compare(comm.rank, peer, training, buffer[1:3].tolist())
        return sizes
