"""A cut graph does what the whole did, bit for bit, or the splitter says why it can't be cut so."""

from __future__ import annotations

import collections
import copy
import os
import sys
from typing import Any

import torch
from hypothesis import HealthCheck, event, given, settings
from tests.fuzz.graphs import Case, Fact, cases
from torch.fx import GraphModule

import partita
from partita._torch.autograd import region_switches as regions
from partita._torch.autograd.region_switches import ENTER_AUTOCAST, EXIT_AUTOCAST
from partita.errors import OrderConflict

EXAMPLES = os.environ.get("PARTITA_FUZZ_EXAMPLES")
SETTINGS = settings(
    max_examples=int(EXAMPLES or 60),
    derandomize=EXAMPLES is None,  # the same examples in every check; `make fuzz` draws new ones
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
OUTCOMES: collections.Counter[str] = collections.Counter()


@SETTINGS
@given(cases())
def test_a_split_graph_equals_the_whole_or_the_conflict_is_real(case: Case) -> None:
    try:
        _check(case)
    finally:
        _close_autocast()


def _check(case: Case) -> None:
    before = _appearance(case.gm)
    cut = _split(case)
    assert _appearance(case.gm) == before
    if isinstance(cut, OrderConflict):
        assert case.on_conflict == "error", f"repair must always succeed: {cut}"
        _assert_real(case, cut.chain)
        _note("refused")
        return
    verification = partita.verify(cut, case.gm, case.args)
    if (
        not verification.ok
        and _share_memory(case.args)
        and "share memory, and the graph writes" in str(verification)
    ):
        _note("refused at run time: arguments share memory")
        return
    if not verification.ok and _both_raise(case, cut, verification):
        _note("both raise, and leave other things half done")
        return
    if not verification.ok and cut.report.reordered:
        kinds = {difference.kind for difference in verification.differences}
        assert kinds == {"gradient"}, verification
        _note("equal within tolerance: a gradient was summed in another order")
        verification = _within_rounding(case, cut)
    verification.check()
    _note("both raise" if verification.raised else "repaired" if cut.report.conflicts else "equal")


def test_outcomes_are_shown() -> None:
    """Not a check: with ``-s`` the counts of the run above are read here."""
    counts = ", ".join(f"{name}: {count}" for name, count in sorted(OUTCOMES.items()))
    sys.stdout.write(f"\n{sum(OUTCOMES.values())} graphs: {counts}\n")


def _close_autocast() -> None:
    """A graph that raised inside autocast leaves it open: later graphs would never empty the cache."""
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    regions._SCOPES.open = 0
    torch.clear_autocast_cache()


def _split(case: Case) -> partita.Split | OrderConflict:
    try:
        return partita.split(case.gm, case.keys, on_conflict=case.on_conflict, shared=case.shared)
    except OrderConflict as conflict:
        return conflict


def _note(outcome: str) -> None:
    OUTCOMES[outcome] += 1
    event(outcome)


def _appearance(gm: GraphModule) -> object:
    """All that a user could see changed: the graph, attributes on nodes, the module's own, and the values
    of its state.
    """
    nodes = [
        (
            node.name,
            node.op,
            node.target,
            str(node.args),
            str(node.kwargs),
            dict(node.meta),
            len(node.users),
            sorted(vars(node)),
        )
        for node in gm.graph.nodes
    ]
    tensors = [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False)]
    state = [(name, id(tensor), tensor._version, tensor.tolist()) for name, tensor in tensors]
    return (
        nodes,
        sorted(vars(gm)),
        sorted(gm._modules),
        state,
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    )


def _both_raise(case: Case, cut: partita.Split, verification: partita.Verification) -> bool:
    """Whether both raise, and differ only in what is not promised then.

    When a graph raises in the middle, a region stays open until its guard is garbage; and where nodes were
    reordered, others have run by then, and it may be another of several wrong nodes that raises.
    """
    kinds = {difference.kind for difference in verification.differences}
    alike = verification.compared.get("exceptions") == 1 and "exception" not in kinds
    if not cut.report.reordered:
        return alike and kinds == {"global state"}
    return alike or all(partita.verify(one, one, case.args).raised for one in (case.gm, cut))


def _within_rounding(case: Case, cut: partita.Split) -> partita.Verification:
    """The comparison for gradients that were summed in another order.

    Under autocast sums are rounded so coarsely that a tolerance says little: there the same pieces have to
    agree closely with autocast switched off.
    """
    if not any(node.target is ENTER_AUTOCAST for node in case.gm.graph.nodes):
        return partita.verify(cut, case.gm, case.args, rtol=1e-5, atol=1e-6)
    twin = copy.deepcopy(case.gm)
    for node in twin.graph.find_nodes(op="call_function", target=ENTER_AUTOCAST):
        node.args = (*node.args[:2], False, *node.args[3:])
    twin.recompile()
    same = partita.split(twin, case.keys, on_conflict=case.on_conflict, shared=case.shared)
    assert [piece.node_names for piece in same.pieces] == [piece.node_names for piece in cut.pieces]
    close = partita.verify(same, twin, case.args, rtol=1e-5, atol=1e-6)
    if close.raised:  # dtypes that only autocast reconciles
        return partita.verify(cut, case.gm, case.args, rtol=2e-2, atol=2e-2)
    return close


def _share_memory(args: tuple[Any, ...]) -> bool:
    addresses = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
    return len(set(addresses)) < len(addresses)


def _assert_real(case: Case, chain: tuple[str, ...]) -> None:
    """The chain is a cycle of pieces: before → after across a border, after and the next before in one
    piece.
    """
    assert len(chain) >= 4
    assert len(chain) % 2 == 0
    nodes = {node.name: node for node in case.gm.graph.nodes}
    order = {name: position for position, name in enumerate(nodes)}
    pairs = list(zip(chain[::2], chain[1::2], strict=True))
    for (before, after), (following, _) in zip(pairs, [*pairs[1:], pairs[0]], strict=True):
        assert case.keys[before] != case.keys[after]
        assert case.keys[after] == case.keys[following]
        assert order[before] < order[after]
        by_value = nodes[before] in nodes[after].all_input_nodes or _both_under_autocast(case, before, after)
        assert by_value or _depend(case.facts[before], case.facts[after]), (
            f"{before} and {after} do not depend on each other"
        )


def _depend(one: Fact, other: Fact) -> bool:
    if (one.random and other.random) or (one.host and other.host):
        return True
    return bool(one.writes & other.touches or other.writes & one.touches)


def _both_under_autocast(case: Case, one: str, other: str) -> bool:
    """Whether both nodes stand in an autocast region, so that they may share converted weights."""
    depth, inside = 0, set()
    for node in case.gm.graph.nodes:
        depth += (node.target is ENTER_AUTOCAST) - (node.target is EXIT_AUTOCAST)
        if depth:
            inside.add(node.name)
    return {one, other} <= inside
