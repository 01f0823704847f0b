"""What the units of a stage need while they run adds up to what the stage needs, measured as one unit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from partita.capture import capture
from partita.pipelining.frontends.graph.units.chosen_units import units_to_plan
from partita.pipelining.frontends.graph.units.costs import cost_model
from partita.pipelining.frontends.graph.units.unit_runs import GraphLoss
from partita.planning import CostModel, Unit
from partita.planning.costs.recompute import recomputed_cost
from partita.planning.costs.spanning import SpanningValue
from partita.planning.costs.workspaces import half_workspaces, workspaces


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(h)) + x).relu()


def costs_of(stages: int) -> tuple[CostModel, CostModel, list[tuple[int, int]]]:
    """Of the units of a model, of its stages as units, and the units of each stage."""
    torch.manual_seed(0)
    args = (torch.randn(2, 4, 16, 16),)
    captured = capture(nn.Sequential(*(Residual() for _ in range(4))), args, prove=False)
    ends = units_to_plan(captured.module, None, 8, None)[0]
    borders = [len(ends) * stage // stages for stage in range(1, stages)]
    # Without a loss a stage that is run alone would hold the gradient of its result.
    loss = GraphLoss(functional.mse_loss, torch.zeros(()).expand_as(args[0]), itemgetter(0))
    fine, coarse = (
        cost_model(captured.module, at, args, repeats=1, loss=loss)
        for at in (ends, [ends[b] for b in borders])
    )
    edges = [0, *(border + 1 for border in borders), len(fine.units)]
    return fine, coarse, [(start, end - 1) for start, end in pairwise(edges)]


def test_only_the_first_unit_of_a_stage_or_of_what_is_recomputed_copies_gradients() -> None:
    add = Unit("a", 1.0, 2.0, activation_bytes=4, backward_workspace_bytes=10, copied_gradient_bytes=5)
    costs = CostModel(tuple(replace(add, name=name, activation_bytes=0) for name in "abc"), (1, 1))
    assert workspaces(costs, 1, 2) == (0, 15)
    within = replace(costs, units=(replace(costs.units[0], copied_gradient_bytes=0), *costs.units[1:]))
    assert workspaces(within, 0, 2) == (0, 10)
    assert recomputed_cost(within, 0, 2, ((0, 0),)).backward_workspace_bytes == 10
    assert recomputed_cost(within, 0, 2, ((1, 2),)).backward_workspace_bytes == 15


@pytest.mark.parametrize("stages", [2, 3])
def test_units_add_up_to_what_a_stage_needs_while_it_runs(stages: int) -> None:
    """What a unit is given and nobody keeps, what a stage has put out, and the gradients that it was sent
    were taken to be gone: a residual network's passes seemed to need up to a half less than they do.
    """
    fine, coarse, ends = costs_of(stages)
    assert len(fine.units) > 2 * stages
    value = 2 * 4 * 16 * 16 * 4
    for stage, units in enumerate(ends):
        forward, backward = workspaces(fine, *units)
        whole_forward, whole_backward = workspaces(coarse, stage, stage)
        assert whole_forward <= forward <= whole_forward + (value if stage == stages - 1 else 0)
        assert whole_backward - value / 8 < backward <= whole_backward + value
        # Not all that a unit alone needs at once is there together in a stage.
        (inputs, weights), whole = half_workspaces(fine, *units), half_workspaces(coarse, stage, stage)
        assert whole[0] - value < inputs <= whole[0] + value
        assert not stage or weights == whole[1]


def test_what_the_model_returns_is_there_until_i_is_over() -> None:
    units = tuple(
        Unit(name, 1.0, 2.0, activation_bytes=5, weight_activation_bytes=2, input_workspace_bytes=4,
             weight_workspace_bytes=9, backward_input_s=1.0, backward_weight_s=1.0) for name in "ab"
    )  # fmt: skip
    costs = CostModel(units, (1,))
    assert half_workspaces(costs, 0, 1) == (4, 9)
    assert half_workspaces(replace(costs, returned_bytes=(0, 5)), 0, 1) == (4 + 2 - 5 + 5, 9)


@pytest.mark.parametrize("size", [8, 600_000, 2_000_000])
def test_gradients_of_small_weights_are_there_together(size: int) -> None:
    """A tiny T5's W needed ten times what was planned: all of its layers' gradients, not those of one."""
    units = tuple(
        Unit(name, 1.0, 2.0, parameter_bytes=size, weight_activation_bytes=2, input_workspace_bytes=4,
             weight_workspace_bytes=size + 1, backward_input_s=1.0, backward_weight_s=1.0) for name in "abc"
    )  # fmt: skip
    assert half_workspaces(CostModel(units, (1, 1)), 0, 2) == (8, (3 if size == 8 else 1) * size + 1)


def test_units_with_small_weights_add_up_to_what_w_of_a_stage_needs() -> None:
    args = (torch.randn(4, 32),)
    captured = capture(nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))), args, prove=False)
    ends = units_to_plan(captured.module, None, 4, None)[0]
    fine, coarse = (cost_model(captured.module, at, args, repeats=1) for at in (ends, [ends[3]]))
    halves, whole = half_workspaces(fine, 4, len(ends)), half_workspaces(coarse, 1, 1)
    assert halves is not None
    assert whole is not None
    assert halves[1] == pytest.approx(whole[1], rel=0.02)


def test_what_was_sent_to_the_stage_is_counted_once_where_the_last_unit_has_caught_it() -> None:
    first = Unit("a", 1.0, 2.0, activation_bytes=5, input_workspace_bytes=4, weight_workspace_bytes=9)
    catching = replace(first, name="b", weight_activation_bytes=8, caught_bytes=3)
    handing_on = replace(first, name="b")
    for unit in (catching, handing_on):
        costs = CostModel((first, unit, replace(first, name="c")), (3, 3), entry_bytes=(0, 0))
        assert half_workspaces(costs, 0, 1) == (4 + 3, 9)


def test_what_a_unit_makes_is_there_beside_what_it_needs() -> None:
    maker = Unit("a", 1.0, 2.0, activation_bytes=5, forward_workspace_bytes=3)
    user = Unit("b", 1.0, 2.0, activation_bytes=2)
    nobody_keeps = CostModel((maker, user), (6,), entry_bytes=(0,), exit_bytes=(6,), passing_bytes=(6,))
    assert workspaces(nobody_keeps, 0, 1)[0] == 3 + 6 - 2
    its_maker_keeps = replace(nobody_keeps, exit_bytes=(0,), passing_bytes=None)
    assert workspaces(its_maker_keeps, 0, 1)[0] == 3 - 2


def decoder_behind_encoder() -> CostModel:
    """Of an encoder, the embedding of a decoder, and two blocks of it, of which the second takes both."""
    trained = Unit(
        "encoder", 1.0, 2.0, activation_bytes=5, weight_activation_bytes=7, backward_input_s=1.5,
        backward_weight_s=0.5, backward_workspace_bytes=6, input_workspace_bytes=4, weight_workspace_bytes=3,
    )  # fmt: skip
    embedding = replace(trained, name="embed", backward_input_s=0.0, backward_weight_s=2.0, caught_bytes=2)
    units = (trained, embedding, replace(trained, name="self"), replace(trained, name="cross"))
    past = (SpanningValue(4, 4, 0, (3,)),)
    return CostModel(units, (4, 6, 6), entry_bytes=(0, 0, 0), entry_left_bytes=(0, 0, 0), spanning=past)


def test_units_that_nothing_entering_leads_to_are_left_to_w() -> None:
    costs = decoder_behind_encoder()
    assert [sorted(costs.only_in_w(*ends)) for ends in ((1, 3), (2, 3), (1, 2), (0, 3))] == [
        [1, 2],
        [],
        [1, 2],
        [],
    ]
    assert costs.split_backward_s(1, 3) == (1.5, 0.5 + 2.0 + 2.0)
    # what they keep, and the gradient that the last block computes for them or that is sent for them
    assert costs.left_bytes(1, 3) == 5 + 5 + 7 + 2
    assert costs.left_bytes(1, 2) == 5 + 5 + 2
    assert half_workspaces(costs, 1, 3) == (4, 3)
    assert half_workspaces(costs, 1, 2) == (0, 6 - 2)


def test_recomputed_units_that_are_left_to_w_take_their_whole_backward_pass_along() -> None:
    costs = decoder_behind_encoder()
    cost = recomputed_cost(costs, 1, 3, [(1, 1)])
    assert (cost.backward_input_s, cost.backward_weight_s) == (1.5 + 2.0, 0.5 + 2.0)
    assert cost.weight_activation_bytes == 5 + 7 + 2


def test_a_gradient_that_was_sent_is_added_up_beside_itself() -> None:
    """A skip connection's gradient from a later stage stays as it is, and the sum is another tensor: made
    when the unit has run, of what was sent and what the unit returns.
    """
    units = tuple(Unit(name, 1.0, 2.0, backward_workspace_bytes=5) for name in "abcd")
    skipping = CostModel(units, (0, 4, 4), entry_bytes=(0, 0, 0), spanning=(SpanningValue(4, 4, 0, (1, 3)),))
    assert workspaces(skipping, 0, 1)[1] == 4 + 4 + 4
    assert workspaces(skipping, 0, 2)[1] == 4 + 4 + 4
    passing = replace(skipping, spanning=(SpanningValue(4, 4, 0, (3,)),))
    assert workspaces(passing, 0, 1)[1] == 5 + 4
