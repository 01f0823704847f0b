"""Ranks that disagree, that die, that raise: every rank gets an error that says what to do, and none
hangs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.ddp.failing import disagreements, four_ranks, survivors
from tests.runtime.worlds import ProcessWorld, endings, patience


@pytest.fixture(autouse=True, scope="module")
def _patience() -> Iterator[None]:
    """Several processes start, each with a compiler, and the machine may be busy."""
    with patience(120.0):
        yield


@pytest.fixture(scope="module")
def texts(_patience: None) -> list[dict[str, str]]:
    return ProcessWorld(2).run(disagreements)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("shape", r"different models: 'weight' is float32 \(3, 3\) True on rank 0 and float32 \(4, 3\) True"),
        ("names", "name the same parameters in another order"),
        (
            "values",
            "'weight' of rank 1 has other values than that of rank 0 .9 of its 9 numbers differ, and 1 more",
        ),
        ("cap", r"bucket_cap_mb is 1 \(1048576 bytes\) on rank 0 and 2 \(2097152 bytes\) on rank 1"),
        ("tuned", "plan is 'measured' on rank 0 and None on rank 1: make them equal"),
        ("hook", "comm_hook is bf16_compress on rank 0 and None on rank 1"),
        ("plans", r"the plan of the buckets is \w{16} \(10 buckets\) on rank 0 and \w{16} \(5 buckets\)"),
        (
            "graphs",
            r"(?s)rank 0 and rank 1 have compiled different backward graphs.*operator aten.cos.default",
        ),
        (
            "graphs later",
            r"(?s)rank 0 and rank 1 have compiled different backward graphs.*leave out check_graphs=True",
        ),
    ],
)
def test_all_ranks_learn_what_they_disagree_about(
    texts: list[dict[str, str]], case: str, message: str
) -> None:
    for text_of in texts:
        assert text_of[case].startswith("SignatureMismatch")
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(text_of[case])


def test_replicas_that_drifted_apart_are_equal_after_the_advice(texts: list[dict[str, str]]) -> None:
    for text_of in texts:
        assert text_of["drift"].startswith(
            "parameter 'weight' of rank 1 has other values than that of rank 0 (2 of its 2 numbers differ"
        )
        assert text_of["drift"].count("trains a model of its own") == 1
        assert text_of["after its advice"] == "no error"


def test_a_rank_that_can_not_replicate_is_an_error_to_the_others(texts: list[dict[str, str]]) -> None:
    assert texts[1]["refused"].startswith("ArgumentError: bucket_cap_mb is 0")
    assert texts[1]["unknown"].startswith("ArgumentError: ignored names 'no'")
    for case in ("refused", "unknown"):
        assert texts[0][case].startswith("PeerFailed: rank 1 failed in replicate()")


def test_ranks_may_compile_different_graphs_where_that_is_meant(texts: list[dict[str, str]]) -> None:
    assert [text_of["graphs allowed"] for text_of in texts] == ["no error", "no error"]


def test_a_rank_that_takes_fewer_steps_is_no_deadlock(texts: list[dict[str, str]]) -> None:
    # rank 0 has two synchronised passes; so has rank 1, after one of its own: that is in order
    assert [text_of["steps"] for text_of in texts] == ["no error", "no error"]


def test_a_rank_that_is_left_in_evaluation_mode_is_an_error_to_all(texts: list[dict[str, str]]) -> None:
    """It takes no buffers of rank 0 over, so its collectives are not those of the others: all waited."""
    for text_of in texts:
        assert text_of["modes"].startswith("DeadlockError")


def test_a_comm_hook_that_raises_on_one_rank_is_named_to_all(texts: list[dict[str, str]]) -> None:
    """The others waited for what it would have sent, and were told of a deadlock."""
    assert texts[0]["hook raised"].startswith(
        "PeerFailed: rank 1 failed in the comm_hook of a replicated module: ValueError: no compression today"
    )
    assert texts[1]["hook raised"] == "ValueError: no compression today"


def test_a_rank_that_raises_in_backward_and_goes_on_is_an_error_to_all(texts: list[dict[str, str]]) -> None:
    for text_of in texts:
        assert text_of["raised"].startswith("ExecutionError: the backward pass raised on rank 1 and not on")


def test_after_that_the_next_batch_can_be_taken(texts: list[dict[str, str]]) -> None:
    assert [text_of["after it"] for text_of in texts] == ["equal", "equal"]


def test_a_rank_that_dies_is_an_error_to_the_others() -> None:
    text, seconds = endings(2, survivors)[0].result
    print("seconds:", round(seconds, 2))  # noqa: T201 - a second, as a rule; ten are allowed
    assert text.startswith("PeerFailed: rank 1 died without a word")


def test_four_ranks_equal_torch_but_for_rounding() -> None:
    assert max(ProcessWorld(4).run(four_ranks)) < 1e-6
