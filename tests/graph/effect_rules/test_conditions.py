from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph

from partita.errors import ExecutionError
from partita.graph.effect_rules.conditions import (
    OnlyIf,
    ReadCondition,
    choose,
    depends_on_branch,
    reads_condition,
    require_condition,
)
from partita.graph.effects import analyse


def graph() -> torch.fx.GraphModule:
    built = Graph()
    x = built.placeholder("x")
    condition = built.call_function(ReadCondition(), (x,))
    doubled = built.call_function(OnlyIf(operator.mul, True), (condition, x, 2))
    chosen = built.call_function(choose, (condition, doubled, x))
    built.call_function(require_condition, (condition, True, "a line", "a reason"))
    built.output(chosen)
    return torch.fx.GraphModule(torch.nn.Module(), built)


def test_a_branch_is_taken_where_its_condition_holds() -> None:
    gm = graph()
    assert gm(torch.tensor(3.0)) == 6.0
    with pytest.raises(
        ExecutionError, match="asks whether a line, and takes another way now that it is False"
    ):
        gm(torch.tensor(0.0))


def test_without_data_a_condition_is_what_it_was_taken_for() -> None:
    assert ReadCondition(True)(torch.empty((), device="meta"))
    assert not ReadCondition(False)(torch.empty((), device="meta"))
    assert ReadCondition(True) == ReadCondition(False)


def test_only_the_check_can_be_observed() -> None:
    gm = graph()
    effects = analyse(gm)
    assert [
        effects.nodes[position].name for position, effect in effects.by_position.items() if effect.observable
    ] == ["require_condition"]


def test_a_tensor_that_is_chosen_can_be_sent_and_what_may_be_none_can_not() -> None:
    nodes = list(graph().graph.nodes)
    assert [depends_on_branch(node) for node in nodes] == [False, True, True, True, False, False]
    (chosen,) = [node for node in nodes if node.target is choose]
    chosen.meta["val"] = torch.zeros(2)
    assert not depends_on_branch(chosen)


def test_a_condition_that_one_branch_asks_for_is_one_too() -> None:
    nodes = list(graph().graph.nodes)
    nodes[2].target = OnlyIf(OnlyIf(ReadCondition(), False), True)
    assert [reads_condition(node) for node in nodes] == [False, True, True, False, False, False]


def test_a_branch_within_a_branch_writes_what_its_function_writes() -> None:
    """Nothing was seen to be written there, so that a cut went through it."""
    gm = graph()
    _, condition, doubled, chosen, *_ = gm.graph.nodes
    doubled.target = OnlyIf(OnlyIf(torch.ops.aten.mul_.Tensor, False), True)
    doubled.args = (condition, condition, *doubled.args[1:])
    chosen.target, chosen.args = OnlyIf(choose, True), (condition, *chosen.args)
    effects = analyse(gm).by_position
    assert effects[2].writes == (doubled.args[2],)
    assert effects[3].aliases == (doubled, doubled.args[2])


def test_a_compiler_is_not_told_an_answer_that_it_does_not_know() -> None:
    """With the answer as a symbol, which *is* neither True nor False, it left both branches out."""
    read, negated = ReadCondition(), OnlyIf(torch.neg, True)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor | None:
        return negated(read(x.sum() > 0), x)

    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(torch._dynamo.exc.UserError, match="data-dependent"),
    ):
        compiled(torch.ones(2))
