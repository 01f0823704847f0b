from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.errors import ScheduleError
from partita.planning import Action, ActionKind, overlap

numbers = st.integers(0, 200)
computes = st.builds(
    Action, numbers, st.sampled_from([ActionKind.F, ActionKind.I, ActionKind.W, ActionKind.B]), numbers
)
sends = st.builds(
    lambda stage, kind, microbatch, peer: Action(stage, kind, microbatch, peer=peer),
    numbers,
    st.sampled_from([ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B]),
    numbers,
    st.none() | numbers,
)
whole = st.builds(
    Action, numbers, st.sampled_from([ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD])
)
overlaps = st.lists(computes, min_size=2, max_size=3).map(lambda parts: overlap(*parts))


@given(computes | sends | whole | overlaps)
def test_text_and_back_gives_the_same_action(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, ActionKind.F, 0)),
        ("0SEND_F1", Action(0, ActionKind.SEND_F, 1)),
        ("1UNSHARD", Action(1, ActionKind.UNSHARD)),
        ("12B345", Action(12, ActionKind.B, 345)),
        ("(0F1;1B0)OVERLAP_F_B", overlap(Action(0, ActionKind.F, 1), Action(1, ActionKind.B, 0))),
    ],
)
def test_the_text_of_an_action_is_torchs(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


@pytest.mark.parametrize(
    "text", ["", "F", "F0", "0X1", "0F1x", "0FULL1", "(0F1)", "()OVERLAP_F_B", "-1F0", "1.5F0", "0F1>2>3"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"is not an action: write it like 2F0"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("kind", "microbatch", "message"),
    [
        (ActionKind.F, None, "F at stage 1 has microbatch None: give one, from 0"),
        (ActionKind.F, -1, "F at stage 1 has microbatch -1: give one, from 0"),
        (ActionKind.UNSHARD, 0, "UNSHARD at stage 1 names microbatch 0: leave it out"),
    ],
)
def test_a_microbatch_stands_where_the_kind_has_one(kind: ActionKind, microbatch: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Action(1, kind, microbatch)


def test_a_negative_stage_is_refused() -> None:
    with pytest.raises(ScheduleError, match="F has stage -2: stages count from 0"):
        Action(-2, ActionKind.F, 0)


def test_only_an_overlap_has_parts() -> None:
    part = Action(0, ActionKind.F, 0)
    with pytest.raises(ScheduleError, match="F at stage 0 has parts: only OVERLAP_F_B has"):
        Action(0, ActionKind.F, 0, (part, part))


@pytest.mark.parametrize("parts", [(), ("0F0",), ("0F0", "0SEND_F0"), ("0F0", "(0F0;0B1)OVERLAP_F_B")])
def test_an_overlap_has_two_or_more_passes(parts: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError, match="give two or more of F, I, W, B"):
        overlap(*map(Action.parse, parts))


def test_an_overlap_has_no_stage_of_its_own() -> None:
    parts = (Action(0, ActionKind.F, 1), Action(0, ActionKind.B, 0))
    with pytest.raises(ScheduleError, match=r"make it with overlap\(\)"):
        Action(0, ActionKind.OVERLAP_F_B, None, parts)


def test_only_communication_has_a_peer() -> None:
    with pytest.raises(ScheduleError, match="F at stage 0 has a peer"):
        Action(0, ActionKind.F, 0, peer=2)


@pytest.mark.parametrize(
    ("text", "other"), [("3SEND_F0", 4), ("3RECV_F0", 2), ("3SEND_B0", 2), ("3RECV_B0", 4), ("3SEND_F0>7", 7)]
)
def test_the_other_end_is_the_neighbour_unless_it_is_named(text: str, other: int) -> None:
    assert Action.parse(text).other_stage == other


def test_a_pass_has_no_other_end() -> None:
    with pytest.raises(ScheduleError, match="3F0 has no other stage"):
        Action.parse("3F0").other_stage  # noqa: B018


def test_an_action_answers_to_torchs_names() -> None:
    action = Action(2, ActionKind.FULL_BACKWARD, 1)
    assert (action.stage_index, action.computation_type, action.microbatch_index) == (2, ActionKind.B, 1)
    assert (action.is_compute_op, action.sub_actions) == (True, None)
    both = overlap(Action(0, ActionKind.FORWARD, 1), action)
    assert both.sub_actions == both.parts
    assert (Action.from_str("2B1"), Action.from_str(" ")) == (action, None)
    assert {kind.name for kind in ActionKind} == {kind.value for kind in ActionKind}
