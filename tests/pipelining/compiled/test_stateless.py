"""A stage's graph as a function of its state and its inputs."""

from __future__ import annotations

import pytest
import torch
from tests.pipelining.order_of_sums import check_against_eager
from torch import nn
from torch.fx import Graph, GraphModule

from partita.graph.effect_rules.conditions import ReadCondition
from partita.pipelining import SplitPoint
from partita.pipelining.compiled.stateless import stateless


def _holder() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    module.enabled = nn.Buffer(torch.tensor(True))
    module.strict = nn.Buffer(torch.tensor(False))
    return module


def test_a_stage_without_inputs_is_a_function_of_its_state() -> None:
    """A first stage that computes no more than a normed weight is given nothing, and its graph began with
    what is replaced: KeyError.
    """
    holder, graph = _holder(), Graph()
    weight, enabled = graph.get_attr("weight"), graph.get_attr("enabled")
    graph.output(graph.call_function(torch.mul, (weight, enabled)))
    function = stateless(GraphModule(holder, graph), holder)
    assert function.state == ("weight", "enabled")
    assert torch.equal(function.module(holder.weight, holder.enabled), holder.weight)


def test_what_the_host_reads_from_state_alone_is_read_before_a_stage_without_inputs() -> None:
    holder, graph = _holder(), Graph()
    answers = [
        graph.call_function(ReadCondition(), (graph.get_attr(name),)) for name in ("enabled", "strict")
    ]
    graph.output((*answers, graph.get_attr("weight")))
    function = stateless(GraphModule(holder, graph), holder)
    assert function.conditions is not None
    state = [getattr(holder, name) for name in function.state]
    conditions = function.conditions(*state)
    assert tuple(conditions) == (True, False)
    assert function.module(*state, *conditions)[:2] == (True, False)


@pytest.mark.parametrize("written", ["by what is read", "by others too", "of the caller"])
def test_what_is_read_may_write_to_memory_of_its_own(written: str) -> None:
    """A mask that is filled in place before the host looks at it (Longformer): its stage ran uncompiled."""
    graph = Graph()
    x = graph.placeholder("x")
    mask = x if written == "of the caller" else graph.call_function(torch.ops.aten.clone.default, (x,))
    filled = graph.call_function(torch.ops.aten.neg_.default, (mask,))
    answer = graph.call_function(torch.ops.aten.all.default, (filled,))
    condition = graph.call_function(ReadCondition(), (answer,))
    if written == "by others too":
        graph.call_function(torch.ops.aten.neg_.default, (mask,))
    graph.output((condition, mask))
    function = stateless(GraphModule(nn.Module(), graph), nn.Module())
    if written != "by what is read":
        assert function.conditions is None
        return
    assert function.conditions is not None
    x_value = torch.tensor([-1.0, 0.0])
    assert tuple(function.conditions(x_value)) == (False,)
    assert torch.equal(function.module(False, x_value)[1], torch.tensor([1.0, 0.0]))
    assert torch.equal(x_value, torch.tensor([-1.0, 0.0]))


def test_what_the_host_reads_for_nothing_is_left_out() -> None:
    """A size that the model computes as a tensor (Longformer's chunks): its stage ran uncompiled."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.item.default, (x,))
    used = graph.call_function(torch.ops.aten.item.default, (x,))
    graph.output((used,))
    function = stateless(GraphModule(nn.Module(), graph), nn.Module())
    assert len(function.module.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)) == 1


class Twice(nn.Module):
    """What the middle stage takes twice in one operation has a gradient of the last stage, too."""

    def __init__(self, *, weight: bool, convert: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.weight, self.convert = weight, convert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 2
        shared = self.a.weight if self.weight else h
        y = self.b(h)
        mine = shared.float().contiguous() if self.convert else shared  # the same: it is of float32
        y = self.c(y + torch.bmm(mine[None], mine[None])[0] + mine * mine)
        return y @ shared


@pytest.mark.parametrize(
    ("weight", "convert"),
    [(False, False), (False, True), (True, False)],
    ids=["input", "input through a conversion", "tied parameter"],
)
def test_what_is_twice_an_operand_gets_its_gradients_in_the_order_of_the_model(
    weight: bool, convert: bool
) -> None:
    """They were added up before those of later stages: the last bits differed."""
    torch.manual_seed(0)
    model, x = Twice(weight=weight, convert=convert), torch.randn(12, 6)
    check_against_eager(model, x, {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}, compiled=True)
