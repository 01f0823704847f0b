"""Who writes what into a checkpoint: every name once, and only if all who hold it hold the same.

A name may be held by several: a tied parameter by two stages, everything by the ranks of a data parallel
group. The ranks tell each other what they hold (round 1: names, shapes, types) and compare fingerprints of
what is there more than once (round 2). From these tables, which are the same everywhere, each rank works out
what it writes; nothing more is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from partita.errors import CheckpointError
from partita.pipelining.checkpoints.fingerprint import fingerprint

__all__ = ["Replicas", "Shares", "StateEntry", "share_out", "under"]

Replicas = Literal["equal", "first"]

Gather = Callable[[Any], list[Any]]
"""From this rank's object to those of all ranks, in order."""


def under(section: str, name: str) -> str:
    """The name of something in a section of a checkpoint.

    >>> under("model", "layer.weight"), under("", "layer.weight")
    ('model.layer.weight', 'layer.weight')
    """
    return f"{section}.{name}" if section else name


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A value that this rank could write.

    Attributes:
        section: of the checkpoint; empty for none.
        name: in that section.
        value: a tensor, or anything that prints what it is (a number, a tuple, None).
        root: the first of the names of this value; another name than ``name`` where it is tied.
    """

    section: str
    name: str
    value: Any
    root: str

    @property
    def key(self) -> str:
        """The name in the checkpoint."""
        return under(self.section, self.name)

    @property
    def root_key(self) -> str:
        """Likewise of the root."""
        return under(self.section, self.root)


@dataclass(frozen=True, slots=True)
class _Row:
    """What the others are told about an entry. ``holders``: the ranks that have it together (a sharded
    tensor's mesh), one for a plain tensor.
    """

    kind: str
    size: int
    root: str
    holders: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True)
class Shares:
    """What comes of it.

    Attributes:
        mine: the names that this rank writes.
        aliases: names that point to another one's bytes; the same on every rank.
    """

    mine: tuple[str, ...]
    aliases: Mapping[str, str]


def share_out(entries: Iterable[StateEntry], rank: int, everywhere: Gather, replicas: Replicas) -> Shares:
    """Work out with all other ranks who writes what. Collective.

    Args:
        entries: what this rank holds; a name may be there twice (two stages on one rank).
        rank: this one, as a sharded tensor's mesh counts (in the world).
        replicas: what to do with copies that differ: ``equal`` raises, ``first`` writes the one of the lowest
            rank.

    Raises:
        CheckpointError: two copies of one name differ.
    """
    held: dict[str, list[StateEntry]] = {}
    for entry in entries:
        held.setdefault(entry.key, []).append(entry)
    tables = everywhere({name: [_row(entry, rank) for entry in found] for name, found in held.items()})
    ranks = everywhere(rank)
    rows: dict[str, list[tuple[int, _Row]]] = {}
    for owner, table in zip(ranks, tables, strict=True):
        for name, found in table.items():
            rows.setdefault(name, []).extend((owner, row) for row in found)
    if replicas == "equal":
        _check(held, rows, ranks, everywhere)
    aliases = _aliases(rows)
    writers = _writers({name: found for name, found in rows.items() if name not in aliases}, replicas)
    return Shares(tuple(name for name, holders in writers.items() if rank in holders), aliases)


def _row(entry: StateEntry, rank: int) -> _Row:
    value = entry.value
    if isinstance(value, DTensor):
        holders = tuple(int(other) for other in value.device_mesh.mesh.flatten())
        return _Row(
            _shape(value), value.numel() * value.element_size(), entry.root_key, holders, sharded=True
        )
    if isinstance(value, Tensor):
        return _Row(
            _shape(value), value.numel() * value.element_size(), entry.root_key, (rank,), sharded=False
        )
    kind = f"{len(value)} bytes" if isinstance(value, bytes) else f"{type(value).__name__} {value!r}"
    return _Row(kind, 0, entry.root_key, (rank,), sharded=False)


def _shape(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _check(
    held: Mapping[str, Sequence[StateEntry]],
    rows: Mapping[str, Sequence[tuple[int, _Row]]],
    ranks: Sequence[int],
    everywhere: Gather,
) -> None:
    """Compare all copies; raises the same error on every rank."""
    shared = {name: found for name, found in sorted(rows.items()) if len(found) > 1}
    for name, found in shared.items():
        (first, row), *others = found
        for other, its in others:
            if its.kind != row.kind:
                raise _difference(name, first, other, f"{row.kind} and {its.kind}")
    prints = everywhere({name: _prints(held[name]) for name in shared if name in held})
    for name, found in shared.items():
        numbers = [
            (owner, number)
            for owner, table in zip(ranks, prints, strict=True)
            for number in table.get(name, ())
        ]
        for owner, number in numbers:
            if number != numbers[0][1]:
                what = f"both {found[0][1].kind}, with different values"
                raise _difference(name, numbers[0][0], owner, what)


def _prints(entries: Sequence[StateEntry]) -> list[int]:
    """Of plain tensors. The copies of a sharded one are its mesh's own affair."""
    plain: dict[int, Tensor] = {
        id(entry.value): entry.value
        for entry in entries
        if isinstance(entry.value, Tensor) and not isinstance(entry.value, DTensor)
    }
    return [fingerprint(tensor) for tensor in plain.values()]


def _difference(name: str, first: int, second: int, what: str) -> CheckpointError:
    where = f"ranks {first} and {second}" if first != second else f"two stages of rank {first}"
    return CheckpointError(
        f"{name!r} is not the same on {where} ({what}): copies of one parameter or buffer have drifted "
        "apart. "
        'Find out why, or pass replicas="first" to save the copy of the lowest rank'
    )


def _aliases(rows: Mapping[str, Sequence[tuple[int, _Row]]]) -> dict[str, str]:
    """For each tied name the one that is written. Two ranks may know of different ties: a = b, and b = c."""
    roots = {name: min(row.root for _, row in found) for name, found in rows.items()}
    aliases = {}
    for name in roots:
        root = name
        while roots[root] < root:
            root = roots[root]
        if root != name:
            aliases[name] = root
    return aliases


def _writers(
    rows: Mapping[str, Sequence[tuple[int, _Row]]], replicas: Replicas
) -> dict[str, tuple[int, ...]]:
    """The ranks that write each name: those of the first mesh where it is sharded; the one with the least to
    do where several have all of it.
    """
    load: dict[int, int] = {}
    writers: dict[str, tuple[int, ...]] = {}
    for name, found in sorted(rows.items()):
        sharded = [row.holders for _, row in found if row.sharded]
        if sharded:
            writers[name] = min(sharded)
            continue
        owners = sorted({owner for owner, _ in found})
        owner = owners[0] if replicas == "first" else min(owners, key=lambda rank: (load.get(rank, 0), rank))
        load[owner] = load.get(owner, 0) + found[0][1].size
        writers[name] = (owner,)
    return writers
