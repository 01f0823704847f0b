from __future__ import annotations

import torch

from partita.verification.comparing.aliasing import compare_places, places


def test_views_are_placed_relative_to_the_first_on_their_storage() -> None:
    base = torch.zeros(4, 4)
    by_name = places([("x", base[1]), ("y", base[:, 2]), ("z", base[1])])
    assert (by_name["y"].shares_with, by_name["y"].offset, by_name["y"].strides) == ("x", -2, (4,))
    assert by_name["z"].same_object_as == "z"
    assert by_name["x"].shares_with == "x"


def test_the_same_object_is_told_from_a_view_of_it() -> None:
    x = torch.zeros(2)
    assert places([("x", x), ("y", x)])["y"].same_object_as == "x"
    words = compare_places(places([("x", x), ("y", x[:])]), places([("x", x), ("y", x)]))
    assert words[0].message == (
        "shares the memory of x (offset 0, strides [1]); in the reference it is x itself"
    )


def test_strides_of_single_elements_and_places_of_nothing_do_not_count() -> None:
    base = torch.zeros(4)
    left = places([("x", base), ("y", base.as_strided((1, 4), (7, 1))), ("z", base[:0])])
    right = places([("x", base), ("y", base.as_strided((1, 4), (1, 1))), ("z", torch.zeros(0))])
    assert compare_places(left, right) == []


def test_sparse_and_meta_tensors_have_a_place() -> None:
    meta = torch.zeros(2, device="meta")
    by_name = places([("s", torch.eye(2).to_sparse()), ("m", meta), ("n", meta[:1])])
    assert by_name["s"].shares_with == "s"
    assert by_name["n"].shares_with == "m"
