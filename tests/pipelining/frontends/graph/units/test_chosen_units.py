"""Which units a model is planned with."""

from __future__ import annotations

import torch
from tests.pipelining.frontends.graph.autoencoder import Autoencoder

from partita.capture import capture
from partita.pipelining import measure_units, pipeline
from partita.pipelining.frontends.graph.other_mode import by_mode
from partita.pipelining.frontends.graph.units.chosen_units import units_to_plan
from partita.planning import plan_stages


def test_units_end_where_both_modes_can_be_cut_and_plans_find_theirs_again() -> None:
    model, x = Autoencoder(), torch.randn(2, 4)
    plan = plan_stages(measure_units(model, (x,), stages=3, repeats=1), 3)
    assert pipeline(model, (x,), plan=plan, prove=False).num_stages == 3
    train, evaluation = by_mode(capture(model, (x,), prove=False))
    both = units_to_plan(train.module, evaluation, 3, None)
    of_training = units_to_plan(train.module, None, 3, None)
    assert len(both[1]) < len(of_training[1])
    assert units_to_plan(train.module, evaluation, None, plan) == both


def test_a_plan_that_was_made_for_training_alone_fits_both_modes() -> None:
    model, x = Autoencoder(), torch.randn(2, 4)
    pipe = pipeline(model, (x,), stages=2, modes="train", prove=False)
    assert pipe.plan is not None
    train, evaluation = by_mode(capture(model, (x,), prove=False))
    ends, _ = units_to_plan(train.module, evaluation, None, pipe.plan)
    assert len(ends) + 1 == sum(len(stage.units) for stage in pipe.plan.stages)
