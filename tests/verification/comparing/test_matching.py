from __future__ import annotations

import pytest

from partita.verification.comparing.matching import match_names

WEIGHT, OTHER, COPY = object(), object(), object()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.weight", "layers.0.weight"),
        ("submod_0.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.submod_1.layers.0.weight", "layers.0.weight"),
        ("layers_0_weight", "layers.0.weight"),
        ("L__self___layers_0_weight", "layers.0.weight"),
        ("weight", "weight"),
        ("submod_0.weight", "weight"),
        ("only", "deep.down.only"),
    ],
)
def test_names_are_matched_with_and_without_prefix(name: str, expected: str) -> None:
    reference = {"weight": OTHER, "layers.0.weight": WEIGHT, "deep.down.only": object()}
    assert match_names({name: COPY}, reference) == {name: expected}


def test_the_same_object_counts_more_than_a_name() -> None:
    assert match_names({"0.weight": WEIGHT}, {"0.weight": OTHER, "2.weight": WEIGHT}) == {
        "0.weight": "2.weight"
    }


def test_of_tied_names_the_common_one_is_taken() -> None:
    assert match_names({"b": WEIGHT}, {"a": WEIGHT, "b": WEIGHT}) == {"b": "b"}


def test_what_has_no_counterpart_or_several_stays_unmatched() -> None:
    assert match_names({"extra": COPY, "weight": COPY}, {"a.weight": WEIGHT, "b.weight": OTHER}) == {}
