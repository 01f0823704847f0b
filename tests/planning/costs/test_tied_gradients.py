"""What stages hold of the gradients of tied parameters."""

from dataclasses import replace

from partita.planning import (
    ActionKind,
    Cluster,
    CostModel,
    Plan,
    TiedUnits,
    Unit,
    get_schedule,
    lower,
    plan_stages,
    reduced_tied_gradients,
    schedule_of,
    search,
    simulate,
)
from partita.planning.costs.recompute import recomputed_cost
from partita.planning.costs.shared_on_rank import shared_on_rank
from partita.planning.costs.tied_gradients import summed_gradients, tied_gradients, tied_messages


def costs(units: tuple[int, ...] = (0, 3)) -> CostModel:
    """Four units, of which some have a matrix of 80 bytes in common, that is all they train."""
    return CostModel(
        tuple(
            Unit(
                name,
                1.0,
                3.0,
                parameter_bytes=80,
                activation_bytes=5,
                backward_input_s=1.0,
                backward_weight_s=2.0,
                weight_activation_bytes=5,
                input_workspace_bytes=1,
                weight_workspace_bytes=1,
            )
            for name in "abcd"
        ),
        (4, 4, 4),
        tied=(TiedUnits(units, 80, gradient_bytes=80),),
    )


def test_a_gradient_goes_from_holder_to_holder() -> None:
    between = costs((0, 2, 3))
    last, middle, owner = (tied_gradients(between, *ends) for ends in ((3, 3), (2, 2), (0, 1)))
    assert (last.sent, last.received, last.owned, last.early) == (80, 0, 0, {3: 1.0})
    assert (middle.sent, middle.received, middle.owned, middle.early) == (80, 80, 0, {2: 1.0})
    assert (owner.sent, owner.received, owner.owned, owner.early) == (0, 80, 80, {})
    whole = tied_gradients(between, 0, 3)
    assert (whole.sent, whole.received, whole.owned, whole.early) == (0, 0, 0, {})


def test_frozen_parameters_send_nothing() -> None:
    frozen = CostModel(costs().units, (4, 4, 4), tied=(TiedUnits((0, 3), 80),))
    assert recomputed_cost(frozen, 2, 3).returned_gradient_bytes == 0
    assert tied_gradients(frozen, 2, 3).early == {}


def test_stages_hold_what_is_sent_of_a_tied_gradient() -> None:
    """A GPT-2 cut in two held three embeddings more than was planned for it."""
    first, last = recomputed_cost(costs(), 0, 1), recomputed_cost(costs(), 2, 3)
    assert (first.arriving_gradient_bytes, first.returned_gradient_bytes) == (80, 0)
    assert (last.arriving_gradient_bytes, last.returned_gradient_bytes) == (0, 80)
    untied = recomputed_cost(CostModel(costs().units, (4, 4, 4)), 0, 1)
    peaks = simulate(get_schedule("1F1B")(2, 4), [first, last], Cluster(2)).peak_bytes
    alone = simulate(get_schedule("1F1B")(2, 4), [untied, untied], Cluster(2)).peak_bytes
    assert peaks[0] - alone[0] >= 160  # one that is being summed, and one that arrives
    assert peaks[1] - alone[1] >= 160  # two that are on their way


def test_a_share_is_computed_in_i_and_what_the_owner_is_sent_stays_until_w() -> None:
    first, last = recomputed_cost(costs(), 0, 1), recomputed_cost(costs(), 2, 3)
    assert (last.backward_input_s, last.backward_weight_s) == (4.0, 2.0)
    assert (last.weight_activation_bytes, first.weight_activation_bytes) == (5, 90)
    assert first.backward_weight_s == 4.0


def test_a_tied_gradient_that_stays_on_its_rank_is_no_message() -> None:
    model = costs()
    *_, apart = shared_on_rank(model, (0, 1, 3, 4), (0, 1, 1))
    *_, together = shared_on_rank(model, (0, 1, 3, 4), (0, 1, 0))
    assert (apart.sent_tied_bytes, together.sent_tied_bytes) == (0, 80)
    assert recomputed_cost(model, 3, 3, shared=together).returned_gradient_bytes == 0


def test_each_holder_sends_to_the_one_before_it() -> None:
    between = costs((0, 2, 3))
    assert tied_messages(between, (0, 1, 2, 3, 4)) == [(), (), ((0, 80),), ((2, 80),)]
    assert tied_messages(between, (0, 1, 2, 4)) == [(), (), ((0, 80),)]
    assert tied_messages(between, (0, 4)) == [()]
    two = CostModel(between.units, (4, 4, 4), tied=(*between.tied, TiedUnits((0, 3), 4, gradient_bytes=8)))
    assert tied_messages(two, (0, 2, 3, 4)) == [(), ((0, 80),), ((0, 8), (1, 80))]
    frozen = CostModel(between.units, (4, 4, 4), tied=(TiedUnits((0, 3), 80),))
    assert tied_messages(frozen, (0, 2, 4)) == [(), ()]


def test_the_stage_that_takes_a_tied_gradient_waits_for_its_message() -> None:
    """A GPT-2 whose head is tied to its embedding was as fast on a slow link as one that is not tied."""
    slow = Cluster(4, bandwidth_bytes_per_s=4.0)
    tied = plan_stages(costs(), 4, schedule="1F1B", microbatches=1, cluster=slow)
    untied = plan_stages(
        CostModel(costs().units, (4, 4, 4)), 4, schedule="1F1B", microbatches=1, cluster=slow
    )
    assert simulate(schedule_of(untied), untied).makespan_s == 4 * 4 + 2 * 3
    # Forward to the last stage and back through it; then its matrix goes to the first stage.
    result = simulate(schedule_of(tied), tied)
    assert result.makespan_s == (4 + 3) + 3 + 80 / 4 + 3
    assert [str(span.action) for span in result.critical_path][-2:] == ["3SEND_B0>0", "0B0"]
    again = Plan.from_json(tied.to_json())
    assert simulate(schedule_of(again), again).makespan_s == result.makespan_s


def test_what_a_search_says_of_tied_stages_is_what_the_simulator_says() -> None:
    slow = Cluster(2, bandwidth_bytes_per_s=8.0)
    for candidate in search(costs(), slow, microbatches=4):
        plan = candidate.plan
        assert candidate.makespan_s == simulate(schedule_of(plan), plan).makespan_s


def test_the_nearest_stage_gets_its_gradient_first() -> None:
    """An embedding's gradient went in front of the small one that the next stage waited for."""
    plan = plan_stages(costs(), 4, schedule="Interleaved1F1B", microbatches=2, cluster=Cluster(2, 4.0))
    sent = [
        span.action.other_stage
        for span in simulate(schedule_of(plan), plan).transfers
        if (span.action.stage, span.action.kind, span.action.microbatch) == (3, ActionKind.SEND_B, 0)
    ]
    assert sent == [2, 0]
    lowered = [
        action.other_stage
        for action in lower(
            get_schedule("Interleaved1F1B")(4, 2, 2), [(0, 1), (1, 2), (2, 3), (0, 3)]
        ).actions(1)
        if (action.stage, action.kind, action.microbatch) == (3, ActionKind.SEND_B, 0)
    ]
    assert lowered == [2, 0]


def test_with_one_sum_a_step_nothing_is_sent_and_the_share_is_computed_in_w() -> None:
    reduced = reduced_tied_gradients(costs())
    assert tied_messages(reduced, (0, 1, 4)) == [(), ()]
    assert tied_gradients(reduced, 1, 3) == tied_gradients(replace(costs(), tied=()), 1, 3)
    assert reduced.parameter_bytes(0, 3) == costs().parameter_bytes(0, 3)


def test_the_first_holder_has_the_sum_with_all_later_ones() -> None:
    reduced = reduced_tied_gradients(costs((0, 2, 3)))
    assert summed_gradients(reduced, (0, 1, 2, 3, 4)) == [((80, (2, 3)),), (), (), ()]
    assert summed_gradients(reduced, (0, 1, 2, 4)) == [((80, (2,)),), (), ()]
    assert summed_gradients(reduced, (0, 4)) == [()]
    assert summed_gradients(costs((0, 2, 3)), (0, 1, 4)) == [(), ()]


def test_a_plan_with_one_sum_a_step_ends_with_it() -> None:
    """Its time was left out, so that one sum over a slow link looked like none."""
    slow = Cluster(4, bandwidth_bytes_per_s=4.0)
    plan = plan_stages(reduced_tied_gradients(costs()), 4, schedule="1F1B", microbatches=1, cluster=slow)
    result = simulate(schedule_of(plan), plan)
    assert result.makespan_s == 4 * 4 + 2 * 3 + 2 * 40 / 4
    again = Plan.from_json(plan.to_json())
    assert simulate(schedule_of(again), again).makespan_s == result.makespan_s


def test_what_a_search_says_of_sums_is_what_the_simulator_says() -> None:
    slow = Cluster(2, bandwidth_bytes_per_s=8.0)
    candidates = search(reduced_tied_gradients(costs()), slow, microbatches=4)
    for candidate in candidates:
        plan = candidate.plan
        assert candidate.makespan_s == simulate(schedule_of(plan), plan).makespan_s
    assert any(stage.summed_gradients for one in candidates for stage in one.plan.stages)
