"""What stages hold of the gradients of tied parameters."""

from partita.planning import Cluster, CostModel, TiedUnits, Unit, get_schedule, simulate
from partita.planning.costs.recompute import recomputed_cost
from partita.planning.costs.tied_gradients import tied_gradients


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
    *_, apart = model.shared_on_rank((0, 1, 3, 4), (0, 1, 1))
    *_, together = model.shared_on_rank((0, 1, 3, 4), (0, 1, 0))
    assert (apart.sent_tied_bytes, together.sent_tied_bytes) == (0, 80)
    assert recomputed_cost(model, 3, 3, shared=together).returned_gradient_bytes == 0
