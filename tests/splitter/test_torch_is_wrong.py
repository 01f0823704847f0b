"""Where ``torch.fx.passes.split_module`` is wrong: each test first shows that it (still) is, then that
partita is right.
"""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from tests.splitter.graphs import by_name, callback, graph_of, module_names
from torch import nn
from torch.fx import GraphModule
from torch.fx.passes.split_module import split_module as torch_split_module

import partita
from partita.errors import OrderConflict
from partita.splitter import split_module

set_grad = torch._C._set_grad_enabled
enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast


def check(gm: GraphModule, keys: dict[str, int], *args: object, repair: bool = False) -> partita.Split:
    """Both of partita's splitters agree with the graph that was cut."""
    cut = partita.split(gm, keys, on_conflict="repair" if repair else "error")
    partita.verify(cut, gm, args).check()
    if not repair:
        partita.verify(split_module(gm, None, by_name(keys)), gm, args).check()
    return cut


def test_pieces_without_a_data_edge_keep_their_order() -> None:
    def build(g, x):
        g.call_method("add_", (x, 1.0), name="write")
        return g.call_function(torch.mul, (x, 2.0), name="read")

    gm, keys = graph_of(build), {"write": 0, "read": 1}
    theirs = torch_split_module(graph_of(build), None, by_name(keys))
    assert theirs(torch.zeros(1)).item() == 0.0  # the pieces run backwards
    cut = check(gm, keys, torch.zeros(1))
    assert cut.module(torch.zeros(1)).item() == 2.0


@pytest.mark.parametrize("keep_original_order", [False, True])
def test_a_write_between_two_reads_of_one_piece_is_a_conflict_or_repaired(keep_original_order: bool) -> None:
    def build(g, x):
        before = g.call_function(torch.neg, (x,), name="before")
        g.call_method("add_", (x, 1.0), name="write")
        after = g.call_function(torch.abs, (x,), name="after")
        return before, after

    gm, keys = graph_of(build), {"before": 0, "write": 1, "after": 0}
    theirs = torch_split_module(graph_of(build), None, by_name(keys), keep_original_order=keep_original_order)
    assert [value.item() for value in theirs(torch.ones(1))] != [-1.0, 2.0]
    with pytest.raises(OrderConflict) as caught:
        split_module(gm, None, by_name(keys), keep_original_order=keep_original_order)
    assert caught.value.chain == ("before", "write", "write", "after")
    cut = check(gm, keys, torch.ones(1), repair=True)
    assert [piece.name for piece in cut.pieces] == ["submod_0", "submod_1", "submod_0_part1"]


def test_a_write_through_a_view_is_seen_by_a_reader_of_its_base() -> None:
    def build(g, x):
        base = g.call_function(torch.add, (x, 0.0), name="base")
        view = g.call_method("view", (base, -1), name="view")
        g.call_method("mul_", (view, 3.0), name="write")
        return g.call_function(torch.neg, (base,), name="read")

    gm, keys = graph_of(build), {"base": 0, "view": 0, "write": 1, "read": 2}
    theirs = torch_split_module(graph_of(build), None, by_name(keys))
    assert theirs(torch.ones(1)).item() == -1.0
    check(gm, keys, torch.ones(1))
    assert gm(torch.ones(1)).item() == -3.0


def test_random_numbers_are_drawn_in_order() -> None:
    def build(g, x):
        first = g.call_function(nn.functional.dropout, (x, 0.5, True), name="first")
        second = g.call_function(nn.functional.dropout, (x, 0.5, True), name="second")
        return first, second

    keys = {"first": 0, "second": 1}
    x = torch.ones(64)
    torch.manual_seed(0)
    expected = graph_of(build)(x)
    torch.manual_seed(0)
    theirs = torch_split_module(graph_of(build), None, by_name(keys))(x)
    assert torch.equal(theirs[0], expected[1])  # the second piece drew first
    check(graph_of(build), keys, x)


def test_prints_keep_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    def build(g, x):
        g.call_function(print, ("one",), name="first")
        g.call_function(print, ("two",), name="second")
        return x

    keys = {"first": 0, "second": 1}
    torch_split_module(graph_of(build), None, by_name(keys))(torch.ones(1))
    assert capsys.readouterr().out.split() == ["two", "one"]
    check(graph_of(build), keys, torch.ones(1)).module(torch.ones(1))
    assert capsys.readouterr().out.split() == ["one", "two"]


def test_grad_mode_does_not_leak_out_of_a_region() -> None:
    def build(g, x):
        first = g.call_function(torch.sin, (x,), name="first")
        g.call_function(set_grad, (False,), name="off")
        second = g.call_function(torch.cos, (x,), name="second")
        g.call_function(set_grad, (True,), name="on")
        third = g.call_function(torch.add, (x, 2.0), name="third")
        return first, second, third

    keys = {"first": 0, "off": 1, "second": 1, "on": 2, "third": 2}
    x = torch.ones(1, requires_grad=True)
    try:
        theirs = torch_split_module(graph_of(build), None, by_name(keys))(x)
        assert [value.requires_grad for value in theirs] != [True, False, True]
        assert not torch.is_grad_enabled()  # it is left off, too
    finally:
        torch.set_grad_enabled(True)
    check(graph_of(build), keys, x)


def test_a_piece_that_only_writes_survives_dead_code_elimination() -> None:
    def build(g, x):
        g.call_method("add_", (x, 1.0), name="write")
        return g.call_function(torch.mul, (x, 2.0), name="read")

    keys = {"write": 0, "read": 1}
    theirs = torch_split_module(graph_of(build), None, by_name(keys), keep_original_order=True)
    theirs.graph.eliminate_dead_code()
    assert module_names(theirs) == ["submod_1"]
    for cut in (
        partita.split(graph_of(build), keys).module,
        split_module(graph_of(build), None, by_name(keys)),
    ):
        cut.graph.eliminate_dead_code()
        cut.recompile()
        assert module_names(cut) == ["submod_0", "submod_1"]
        partita.verify(cut, graph_of(build), (torch.zeros(1),)).check()


def test_a_piece_that_needs_a_later_one_works_in_original_order() -> None:
    """cos in piece 0, sin in piece 1, their sum in piece 0: piece 1 has to come first."""

    def build(g, x):
        first = g.call_function(torch.cos, (x,), name="first")
        second = g.call_function(torch.sin, (x,), name="second")
        return g.call_function(torch.add, (first, second), name="total")

    keys = {"first": 0, "second": 1, "total": 0}
    with pytest.raises(KeyError):
        torch_split_module(graph_of(build), None, by_name(keys), keep_original_order=True)
    cut = split_module(graph_of(build), None, by_name(keys), keep_original_order=True)
    partita.verify(cut, graph_of(build), (torch.ones(2),)).check()


def build_autocast(g, x):
    region = g.call_function(enter_autocast, ("cpu", torch.bfloat16, True, True), name="enter")
    first = g.call_function(torch.mm, (x, x), name="first")
    second = g.call_function(torch.mm, (first, x), name="second")
    g.call_function(exit_autocast, (region,), name="leave")
    return g.call_function(torch.add, (second, 1), name="last")


def test_an_affix_works_together_with_autocast() -> None:
    keys = {"enter": 0, "first": 0, "second": 1, "leave": 1, "last": 1}
    with pytest.raises(KeyError):
        torch_split_module(graph_of(build_autocast), None, by_name(keys), partition_affix="pp")
    cut = split_module(graph_of(build_autocast), None, by_name(keys), partition_affix="pp")
    assert cut.meta["partition_names"] == {"submod_pp_0", "submod_pp_1"}
    partita.verify(cut, graph_of(build_autocast), (torch.ones(2, 2),)).check()


def test_regions_need_no_increasing_piece_numbers() -> None:
    keys = {"enter": 1, "first": 1, "second": 0, "leave": 0, "last": 0}
    with pytest.raises(AssertionError, match="monotonically"):
        torch_split_module(graph_of(build_autocast), None, by_name(keys))
    check(graph_of(build_autocast), keys, torch.ones(2, 2))


def test_a_cycle_names_the_chain_of_nodes() -> None:
    def build(g, x):
        first = g.call_function(torch.sin, (x,), name="first")
        second = g.call_function(torch.cos, (first,), name="second")
        return g.call_function(torch.neg, (second,), name="third")

    keys = {"first": 0, "second": 1, "third": 0}
    with pytest.raises(RuntimeError, match=r"^cycle exists between partitions!$"):
        torch_split_module(graph_of(build), None, by_name(keys))
    with pytest.raises(
        OrderConflict, match=r"'first' in piece '0' must run before 'second' in piece '1': it uses its value"
    ) as caught:
        split_module(graph_of(build), None, by_name(keys))
    assert caught.value.chain == ("first", "second", "second", "third")


def test_the_callback_is_called_once_a_node() -> None:
    keys = {"enter": 0, "first": 0, "second": 1, "leave": 1, "last": 1}
    theirs, ours = callback(keys), callback(keys)
    torch_split_module(graph_of(build_autocast), None, theirs)
    assert max(theirs.calls.values()) > 1
    split_module(graph_of(build_autocast), None, ours)
    assert ours.calls == dict.fromkeys(keys, 1)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, pair: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.linear(pair["a"]).relu() * scale, "b": pair["b"]}


def test_an_exported_program_keeps_its_signature() -> None:
    args = ({"a": torch.ones(2, 3), "b": torch.ones(1)},)
    kwargs = {"scale": torch.ones(())}
    gm = torch.export.export(TwoInputs(), args, kwargs).module()
    names = [node.name for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    keys = {name: number // 2 for number, name in enumerate(names)}
    theirs = torch_split_module(gm, None, by_name(keys))
    with pytest.raises((TypeError, RuntimeError)):
        theirs(*args, **kwargs)
    partita.verify(split_module(gm, None, by_name(keys)), gm, args, kwargs).check()
    partita.verify(partita.split(gm, keys), gm, args, kwargs).check()


def test_the_outer_graph_keeps_metadata_and_the_training_flag() -> None:
    def build(g, x):
        first = g.call_function(torch.sin, (x,), name="first")
        first.meta["val"] = torch.empty(3, device="meta")
        return g.call_function(torch.cos, (first,), name="second")

    gm, keys = graph_of(build), {"first": 0, "second": 1}
    gm.meta["origin"] = "here"
    gm.eval()
    theirs = torch_split_module(gm, None, by_name(keys))
    calls = [node for node in theirs.graph.nodes if node.op == "call_module"]
    assert "val" not in calls[0].meta
    assert "origin" not in theirs.meta
    assert theirs.training
    for cut in (partita.split(gm, keys).module, split_module(gm, None, by_name(keys))):
        calls = [node for node in cut.graph.nodes if node.op == "call_module"]
        assert calls[0].meta["val"].shape == (3,)
        assert cut.meta["origin"] == "here"
        assert not cut.training
        assert not any(module.training for module in cut.modules())


def test_a_tuple_that_crosses_is_nested_in_the_tuple_return() -> None:
    """There too; here it is documented, and the result is the same."""

    def build(g, x):
        pair = g.call_function(torch.split, (x, 1), name="pair")
        return g.call_function(torch.cat, (pair,), name="joined")

    keys = {"pair": 0, "joined": 1}
    ours = split_module(graph_of(build), None, by_name(keys), tuple_return=True)
    cuts = [ours]
    if "tuple_return" in signature(torch_split_module).parameters:  # not before torch 2.12
        cuts.append(torch_split_module(graph_of(build), None, by_name(keys), tuple_return=True))
    for cut in cuts:
        ((first, second),) = cut.submod_0(torch.ones(2))
        assert first.shape == second.shape == (1,)
    partita.verify(ours, graph_of(build), (torch.ones(2),)).check()


def test_flat_names_of_modules_never_collide() -> None:
    """``a.b`` and ``a_b`` are different modules; under one flat name the second replaces the first."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleDict({"b": nn.Linear(2, 2)})
            self.a_b = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a_b(self.a["b"](x))

    gm = torch.fx.symbolic_trace(Model())
    x = torch.ones(1, 2)
    theirs = torch_split_module(gm, None, lambda node: 0)
    assert not torch.equal(theirs(x), gm(x))
    names: dict[str, str] = {}
    ours = split_module(gm, None, lambda node: 0, names)
    partita.verify(ours, gm, (x,)).check()
    assert {"a.b", "a_b"} <= set(names.values())
    assert len(set(names.values())) == len(names)


def test_pickling_keeps_grad_regions() -> None:
    """``GraphModule`` is traced again when it is loaded, and the switches run then and are gone."""

    def build(g, x):
        g.call_function(set_grad, (False,), name="off")
        return g.call_function(torch.sin, (x,), name="sin")

    import pickle

    x = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        theirs = pickle.loads(pickle.dumps(graph_of(build)))
    with torch.enable_grad():
        assert theirs(x).requires_grad
        ours = pickle.loads(pickle.dumps(partita.split(graph_of(build), {"sin": 0}).module))
        assert torch.is_grad_enabled()
        assert not ours(x).requires_grad
