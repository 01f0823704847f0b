"""What all ranks have to agree on before they reduce anything: parameters, graphs, the order of gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from partita.errors import SignatureMismatch
from partita.graph.effects import metadata
from partita.runtime import Comm
from partita.runtime.same_settings import refuse_differences, short_digest

__all__ = ["GraphFingerprint", "Proposal", "agree", "check_same_replicas", "fingerprint_of"]


@dataclass(frozen=True)
class GraphFingerprint:
    """What a backward graph should have in common with those of other ranks.

    Attributes:
        gradients: names of the parameters whose gradients it computes, in the order in which they are ready.
        operators: how often it computes with each operator; views and arithmetic on sizes do not count.
        inputs: shapes and dtypes of what its forward graph was compiled for, parameters apart.
    """

    gradients: tuple[str, ...]
    operators: tuple[tuple[str, int], ...]
    inputs: str = ""

    def fits(self, others: Iterable[GraphFingerprint]) -> bool:
        """Return whether one of ``others`` is this graph, or may be it for a batch of another size.

        A batch of one needs fewer sums and copies, and what is kept or computed again depends on sizes too.
        """
        alike = [other for other in others if set(other.gradients) == set(self.gradients)]
        if any((other.gradients, other.operators) == (self.gradients, self.operators) for other in alike):
            return True
        return bool(alike) and all(other.inputs != self.inputs for other in alike)

    def __str__(self) -> str:
        number = short_digest(repr((self.gradients, self.operators)), 8)
        return (
            f"graph {number} ({len(self.gradients)} gradients, {sum(n for _, n in self.operators)} operators)"
        )

    def difference(self, other: GraphFingerprint) -> str:
        """Return the first thing in which two fingerprints differ, in words."""
        mine, theirs = set(self.gradients), set(other.gradients)
        if mine != theirs:
            return f"the gradient of {min(mine ^ theirs)!r} is computed by one of them only"
        here, there = Counter(dict(self.operators)), Counter(dict(other.operators))
        for name in sorted(here.keys() | there.keys()):
            if here[name] != there[name]:
                return (
                    f"operator {name} stands {here[name]} times in one and {there[name]} times in the other"
                )
        return "the gradients get ready in another order"


def fingerprint_of(gm: GraphModule, gradients: Sequence[str], inputs: str) -> GraphFingerprint:
    """Return the fingerprint of a backward graph from AOTAutograd."""
    counts: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(metadata(node), torch.Tensor):
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is not None and any(result.alias_info is not None for result in schema.returns):
            continue
        counts[str(node.target)] += 1
    return GraphFingerprint(tuple(gradients), tuple(sorted(counts.items())), inputs)


@dataclass(frozen=True)
class Proposal:
    """What a rank says at the beginning of a backward pass.

    Attributes:
        step: which synchronised backward pass this is for it, from 0.
        order: the order in which it expects gradients to get ready, by parameter index.
        graphs: what it has compiled so far, without repetitions.
        written: how often its parameters were written to before the first pass; 0 in later ones.
    """

    step: int
    order: tuple[int, ...]
    graphs: tuple[GraphFingerprint, ...]
    written: int = 0


def agree(
    comm: Comm, proposal: Proposal, *, check_graphs: bool, check_weights: Callable[[], None] | None = None
) -> tuple[Proposal, str]:
    """Return rank 0's proposal, and how the graphs of another rank differ from its own, in words.

    Collective.

    Args:
        check_weights: called on every rank where some have written to their parameters and others have not.

    Raises:
        SignatureMismatch: ranks are in different steps, or, where ``check_graphs`` is set, have different
            graphs; on every rank.
    """
    proposals: list[Proposal] = comm.all_gather_object(proposal)
    first, difference = proposals[0], ""
    for rank, other in enumerate(proposals):
        if other.step != first.step:
            raise SignatureMismatch(
                f"rank 0 is in synchronised backward pass {first.step}, rank {rank} in {other.step}: see "
                "that all ranks take the same number of steps, and enter no_sync() in the same ones"
            )
        mine = [graph for graph in first.graphs if not graph.fits(other.graphs)]
        theirs = [graph for graph in other.graphs if not graph.fits(first.graphs)]
        if mine or theirs:
            difference = difference or _graphs_differ(mine, rank, theirs)
    if check_weights is not None and len({other.written for other in proposals}) > 1:
        check_weights()
    if difference and check_graphs:
        raise SignatureMismatch(
            f"{difference}\nSee that no branch of the model depends on the rank or on its data, or leave out "
            "check_graphs=True: gradients are reduced rightly without it too"
        )
    return first, difference


def _graphs_differ(mine: Sequence[GraphFingerprint], rank: int, theirs: Sequence[GraphFingerprint]) -> str:
    lines = [f"rank 0 and rank {rank} have compiled different backward graphs:"]
    lines += [f"  only rank 0: {item}" for item in mine] or ["  only rank 0: none"]
    lines += [f"  only rank {rank}: {item}" for item in theirs] or [f"  only rank {rank}: none"]
    if mine and theirs:
        lines.append(f"  {mine[0].difference(theirs[0])}")
    return "\n".join(lines)


def check_same_replicas(comm: Comm, options: Mapping[str, str], facts: Sequence[tuple[Any, ...]]) -> None:
    """Check that all ranks replicate the same model in the same way. Collective.

    Args:
        options: what ranks have to be given alike, see `partita.runtime.same_settings`.
        facts: for each parameter and buffer a tuple that starts with its name.

    Raises:
        SignatureMismatch: the message names the first difference; on every rank.
    """
    everywhere: list[tuple[dict[str, str], list[tuple[Any, ...]]]] = comm.all_gather_object(
        (dict(options), list(facts))
    )
    refuse_differences([options_of_rank for options_of_rank, _ in everywhere])
    facts_of_0 = everywhere[0][1]
    for rank, (_, facts_of_rank) in enumerate(everywhere):
        if facts_of_rank == facts_of_0:
            continue
        here = {fact[0]: fact for fact in facts_of_0}
        there = {fact[0]: fact for fact in facts_of_rank}
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                raise SignatureMismatch(
                    f"rank 0 and rank {rank} replicate different models: {name!r} is "
                    f"{_described(here.get(name))} on rank 0 and {_described(there.get(name))} on rank "
                    f"{rank}; build the same model on every rank"
                )
        raise SignatureMismatch(
            f"rank 0 and rank {rank} name the same parameters in another order: build the same model on "
            "every rank"
        )


def _described(fact: tuple[Any, ...] | None) -> str:
    return "not there" if fact is None else " ".join(str(part) for part in fact[1:])
