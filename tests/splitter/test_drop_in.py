"""The drop-in gives what torch's own function gives, wherever that is right."""

from __future__ import annotations

import itertools
import re
from inspect import signature
from typing import Any

import pytest
import torch
from tests.splitter.graphs import by_name, graph_of, in_runs
from tests.splitter.models import Net, from_dynamo, traced
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.passes.split_module import Partition as TorchPartition
from torch.fx.passes.split_module import split_module as torch_split_module

import partita
from partita.splitter import Partition, partitions_of, split_module

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "original order": {"keep_original_order": True},
    "original names": {"keep_original_node_name": True},
    "numbered inputs": {"keep_original_input_name": False},
    "affix": {"partition_affix": "pp"},
    "tuples": {"tuple_return": True},
    "all": {
        "keep_original_order": True,
        "keep_original_node_name": True,
        "keep_original_input_name": False,
        "partition_affix": "x",
        "tuple_return": True,
    },
}


class Skips(nn.Module):
    """Values that skip pieces, several outputs, a module called twice, modules deep down, defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)])
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("b", torch.ones(4))

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0, unused: Any = None
    ) -> dict[str, Any]:
        a = self.blocks[0](x) + self.w
        c = self.blocks[1](a) * self.b
        d = self.blocks[1](c + a) * scale
        first, second = torch.split(d + y, 2)
        return {"all": [first, c], "x": x, "w": self.w, "last": second - a}


def attributes(n: int) -> GraphModule:
    root = nn.Module()
    for number in range(n):
        setattr(root, f"p{number}", nn.Parameter(torch.ones(2)))

    def build(g: Any, x: Any) -> Any:
        for number in range(n):
            x = g.call_function(torch.add, (x, g.get_attr(f"p{number}")))
        return x

    return graph_of(build, root=root)


GRAPHS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "skips": (lambda: torch.fx.symbolic_trace(Skips()), (torch.randn(4, 4), torch.randn(4, 4))),
    "net": (lambda: traced(Net().eval(), ()), (torch.randn(3, 4),)),
    "attributes": (lambda: attributes(5), (torch.randn(2),)),
    "dynamo": (
        lambda: from_dynamo(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), (torch.randn(2, 4),)),
        (),
    ),
    "one": (lambda: torch.fx.symbolic_trace(lambda x: torch.sin(x)), (torch.randn(2),)),
}


def calls(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]


def arguments(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]


def without_result_type(code: str) -> str:
    """torch forgets what the whole returns."""
    return re.sub(r"\) -> \w+:", "):", code.strip(), count=1)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_pieces_names_and_results_are_those_of_torch(graph: str, options: str, length: int) -> None:
    make, args = GRAPHS[graph]
    if "tuple_return" in OPTIONS[options] and "tuple_return" not in signature(torch_split_module).parameters:
        pytest.skip("this torch has no tuple_return to compare with")
    torch.manual_seed(0)
    gm = make()
    if not args:
        args = tuple(
            torch.randn(node.meta["example_value"].shape)
            for node in gm.graph.nodes
            if node.op == "placeholder"
        )
    keys = in_runs(gm, length)
    names: tuple[dict[str, str], dict[str, str]] = ({}, {})
    theirs = torch_split_module(gm, None, by_name(keys), names[0], **OPTIONS[options])
    ours = split_module(gm, None, by_name(keys), names[1], **OPTIONS[options])
    assert names[0].items() <= names[1].items()
    # torch before 2.12 does not note the names
    pieces = theirs.meta.get("partition_names", ours.meta["partition_names"])
    assert pieces == ours.meta["partition_names"]
    assert sorted(calls(theirs)) == sorted(calls(ours))
    # torch may take another of the legal orders, and under keep_original_node_name renames the arguments of
    # the whole (L_x_ to l_x_)
    if calls(theirs) == calls(ours) and arguments(theirs) == arguments(gm):
        assert theirs.code.strip() == without_result_type(ours.code)
    assert arguments(ours) == arguments(gm)
    for name in pieces:
        assert getattr(theirs, name).code.strip() == getattr(ours, name).code.strip()
        assert (
            dict(getattr(theirs, name).named_children()).keys()
            == dict(getattr(ours, name).named_children()).keys()
        )
    # torch makes every buffer persistent; before 2.14 `torch.fx` does so, too, where it traces the whole
    assert dict(theirs.named_buffers()).keys() == dict(ours.named_buffers()).keys()
    assert dict(theirs.named_parameters()).keys() == dict(ours.named_parameters()).keys()
    persistent = {name for name, original in names[1].items() if original in gm.state_dict()}
    assert set(ours.state_dict()) == persistent
    partita.verify(ours, theirs, args).check()
    partita.verify(ours, gm, args).check()


def test_independent_pieces_come_in_the_original_order() -> None:
    """torch starts with the last of them; the pieces themselves are the same."""

    def build(g: Graph, x: Any) -> Any:
        return [g.call_function(function, (x,)) for function in (torch.sin, torch.cos, torch.tan)]

    keys = {"sin": 2, "cos": 0, "tan": 1}
    theirs = torch_split_module(graph_of(build), None, by_name(keys))
    ours = split_module(graph_of(build), None, by_name(keys))
    assert calls(ours) == ["submod_2", "submod_0", "submod_1"]
    assert sorted(calls(theirs)) == sorted(calls(ours))
    for name in calls(ours):
        assert getattr(theirs, name).code == getattr(ours, name).code


@pytest.mark.parametrize("key", [0, -1, "a", "a.b", 1.5, None, (0, 1), True])
def test_keys_are_compared_as_text(key: Any) -> None:
    gm = torch.fx.symbolic_trace(lambda x: torch.cos(torch.sin(x)))
    answers = itertools.cycle([key, str(key)])
    ours = split_module(gm, None, lambda node: next(answers))
    assert len(calls(ours)) == 1
    partita.verify(ours, gm, (torch.ones(2),)).check()
    if "." not in str(key):
        assert ours.meta["partition_names"] == {f"submod_{key}"}
        assert split_module(gm, None, lambda node: key, partition_affix="q").meta["partition_names"] == {
            f"submod_q_{key}"
        }


def test_none_one_and_many_outputs() -> None:
    def build(g: Graph, x: Any) -> Any:
        g.call_function(torch.neg, (x,), name="none")
        one = g.call_function(torch.sin, (x,), name="one")
        two = g.call_function(torch.cos, (x,), name="two")
        return one, two, g.call_function(torch.add, (one, two), name="three")

    keys = {"none": 0, "one": 1, "two": 2, "three": 2}
    x = torch.ones(2)
    untupled = split_module(graph_of(build), None, by_name(keys))
    assert untupled.submod_0(x) == ()
    assert isinstance(untupled.submod_1(x), torch.Tensor)
    assert isinstance(untupled.submod_2(x, untupled.submod_1(x)), tuple)
    wrapped = split_module(graph_of(build), None, by_name(keys), tuple_return=True)
    assert isinstance(wrapped.submod_1(x), tuple)
    assert len(wrapped.submod_1(x)) == 1


def test_a_taken_name_is_avoided() -> None:
    root = nn.Module()
    root.submod_0 = nn.Parameter(torch.ones(2))
    gm = graph_of(lambda g, x: g.call_function(torch.add, (x, g.get_attr("submod_0"))), root=root)
    ours = split_module(gm, None, lambda node: 0)
    assert ours.meta["partition_names"] == {"submod_0_"}
    partita.verify(ours, gm, (torch.ones(2),)).check()


def test_the_map_covers_every_called_module_once() -> None:
    gm = torch.fx.symbolic_trace(Skips())
    names: dict[str, str] = {"kept": "as it was"}
    ours = split_module(gm, None, by_name(in_runs(gm, 2)), names)
    assert names.pop("kept") == "as it was"
    modules = {new: old for new, old in names.items() if new in dict(ours.named_modules())}
    assert {new: gm.get_submodule(old) for new, old in modules.items()} == {
        new: ours.get_submodule(new) for new in modules
    }
    for name, parameter in ours.named_parameters():
        assert gm.get_parameter(names[name]) is parameter


def test_a_partition_has_what_torch_has() -> None:
    theirs, ours = TorchPartition("3"), Partition("3")
    assert vars(theirs).keys() == vars(ours).keys()
    for key, value in vars(theirs).items():
        assert type(value) is type(vars(ours)[key])
    assert ours.submod_name == theirs.submod_name == "submod_3"
    assert "'3'" in repr(ours)


def test_partitions_tell_what_depends_on_what() -> None:
    gm = torch.fx.symbolic_trace(Skips())
    cut = partita.split(gm, in_runs(gm, 3))
    partitions = partitions_of(cut, gm)
    assert list(partitions) == [piece.name.removeprefix("submod_") for piece in cut.pieces]
    first, second = partitions["0"], partitions["1"]
    assert first.dependencies == {}
    assert "0" in second.dependencies
    for name, partition in partitions.items():
        assert all(name in partitions[other].dependencies for other in partition.dependents)
        assert all(name in partitions[other].dependents for other in partition.dependencies)
    assert first.node_names == [node.name for node in first.environment if node.name in first.node_names]
    assert all(copy.graph is first.graph for copy in first.environment.values())
    assert set(first.targets) == {"blocks"}


def test_the_map_of_names_has_parameters_and_buffers_too() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
            self.scale = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("shift", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x) * self.scale + self.shift

    gm = torch.fx.symbolic_trace(Model())
    names: dict[str, str] = {}
    result = split_module(gm, None, lambda node: node.op == "call_module", names)
    original = dict(gm.named_parameters()) | dict(gm.named_buffers())
    state = dict(result.named_parameters()) | dict(result.named_buffers())
    assert {names[name] for name in state} == set(original)
    assert all(state[name] is original[names[name]] for name in state)
