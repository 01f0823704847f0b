"""Which rank writes what into a checkpoint: every name once, and only if all copies of it are equal.

A name may have several copies: a tied parameter in two stages, everything in the ranks of a data parallel
group. The ranks exchange what they have (first names, shapes and types, then fingerprints of what has several
copies). From these tables, which are the same everywhere, each rank computes what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from partita._torch.tensors.tensor_text import tensor_text
from partita.errors import CheckpointError
from partita.pipelining.checkpoints.contents.fingerprint import fingerprint

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
        """The name of the root in the checkpoint."""
        return under(self.section, self.root)


@dataclass(frozen=True, slots=True)
class _Row:
    """The description of an entry that all ranks get. ``holders``: the ranks of a sharded tensor's mesh; this
    rank alone for any other value.
    """

    kind: str
    size: int
    root: str
    holders: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True)
class Shares:
    """What this rank writes.

    Attributes:
        mine: the names.
        aliases: from a name to the one whose bytes it shares; the same on every rank.
    """

    mine: tuple[str, ...]
    aliases: Mapping[str, str]


def share_out(entries: Iterable[StateEntry], rank: int, gather: Gather, replicas: Replicas) -> Shares:
    """Share out what to write among the ranks. Collective.

    Args:
        entries: what this rank has; a name may be there twice (two stages on one rank).
        rank: the number of this rank in the world, as in a sharded tensor's mesh.
        replicas: what to do with copies that differ: ``equal`` raises, ``first`` writes the one of the lowest
            rank.

    Raises:
        CheckpointError: two copies of one name differ.
    """
    own_entries: dict[str, list[StateEntry]] = {}
    for entry in entries:
        own_entries.setdefault(entry.key, []).append(entry)
    tables = gather({name: [_row(entry, rank) for entry in copies] for name, copies in own_entries.items()})
    ranks = gather(rank)
    rows: dict[str, list[tuple[int, _Row]]] = {}
    for owner, table in zip(ranks, tables, strict=True):
        for name, copies in table.items():
            rows.setdefault(name, []).extend((owner, row) for row in copies)
    if replicas == "equal":
        _check(own_entries, rows, ranks, gather)
    aliases = _aliases(rows)
    writers = _writers({name: copies for name, copies in rows.items() if name not in aliases}, replicas)
    return Shares(tuple(name for name, holders in writers.items() if rank in holders), aliases)


def _row(entry: StateEntry, rank: int) -> _Row:
    value = entry.value
    if isinstance(value, Tensor):
        kind = tensor_text(value)
        sharded = isinstance(value, DTensor)
        holders = tuple(value.device_mesh.mesh.flatten().tolist()) if isinstance(value, DTensor) else (rank,)
        return _Row(kind, value.numel() * value.element_size(), entry.root_key, holders, sharded)
    kind = f"{len(value)} bytes" if isinstance(value, bytes) else f"{type(value).__name__} {value!r}"
    return _Row(kind, 0, entry.root_key, (rank,), sharded=False)


def _check(
    own_entries: Mapping[str, Sequence[StateEntry]],
    rows: Mapping[str, Sequence[tuple[int, _Row]]],
    ranks: Sequence[int],
    gather: Gather,
) -> None:
    """Compare all copies; raises the same error on every rank."""
    # descriptions
    shared = {name: copies for name, copies in sorted(rows.items()) if len(copies) > 1}
    for name, copies in shared.items():
        (first, row), *others = copies
        for other, its in others:
            if its.kind != row.kind:
                raise _difference(name, first, other, f"{row.kind} and {its.kind}")
    # values
    fingerprints = gather({name: _fingerprints(own_entries[name]) for name in shared if name in own_entries})
    for name, copies in shared.items():
        numbers = [
            (owner, number)
            for owner, table in zip(ranks, fingerprints, strict=True)
            for number in table.get(name, ())
        ]
        for owner, number in numbers:
            if number != numbers[0][1]:
                what = f"both {copies[0][1].kind}, with different values"
                raise _difference(name, numbers[0][0], owner, what)


def _fingerprints(entries: Sequence[StateEntry]) -> list[int]:
    """The fingerprints of unsharded tensors; copies of a sharded one are not compared."""
    tensors: dict[int, Tensor] = {
        id(entry.value): entry.value
        for entry in entries
        if isinstance(entry.value, Tensor) and not isinstance(entry.value, DTensor)
    }
    return [fingerprint(tensor) for tensor in tensors.values()]


def _difference(name: str, first: int, second: int, what: str) -> CheckpointError:
    where = f"ranks {first} and {second}" if first != second else f"two stages of rank {first}"
    return CheckpointError(
        f"{name!r} is not the same on {where} ({what}): copies of one parameter or buffer have drifted "
        'apart. Find out why, or pass replicas="first" to save the copy of the lowest rank'
    )


def _aliases(rows: Mapping[str, Sequence[tuple[int, _Row]]]) -> dict[str, str]:
    """For each tied name the one that is written. Two ranks may have different ties: a = b, and b = c."""
    roots = {name: min(row.root for _, row in copies) for name, copies in rows.items()}
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
    """The ranks that write each name: those of the lowest mesh where it is sharded, otherwise the one of its
    holders that has the fewest bytes to write.
    """
    load: dict[int, int] = {}
    writers: dict[str, tuple[int, ...]] = {}
    for name, copies in sorted(rows.items()):
        sharded = [row.holders for _, row in copies if row.sharded]
        if sharded:
            writers[name] = min(sharded)
            continue
        owners = sorted({owner for owner, _ in copies})
        owner = owners[0] if replicas == "first" else min(owners, key=lambda rank: (load.get(rank, 0), rank))
        load[owner] = load.get(owner, 0) + copies[0][1].size
        writers[name] = (owner,)
    return writers
