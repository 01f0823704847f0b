from __future__ import annotations

import torch

from partita.capture.open_sizes.batch import examples, in_batch, traceable_arguments


def test_the_batch_is_the_size_that_most_tensors_have_first() -> None:
    x, mask, positions = torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(6)
    assert in_batch([x, mask, torch.zeros(()), "n"]) == [0]
    assert in_batch([x, positions]) == [0]
    assert in_batch([positions, x, x.clone()]) == [1, 2]
    assert in_batch([mask, torch.zeros(1)]) == [0, 1]
    assert in_batch([3, None]) == []


def test_a_batch_of_one_is_doubled_first_and_taken_as_it_is_then() -> None:
    x, table = torch.zeros(1, 3, requires_grad=True), {"t": torch.zeros(1, 4)}
    first, second = examples((x,), {"table": table}, frozenset())
    assert first.args[0].shape == (2, 3)
    assert first.args[0].requires_grad
    assert first.kwargs["table"]["t"].shape == (2, 4)
    assert second.args[0] is x
    assert second.flat == [x, table["t"]]


def test_what_is_closed_stays_fixed_and_nothing_is_tried_where_all_is() -> None:
    x = torch.zeros(2, 3)
    (example,) = examples((x, x.clone()), {}, frozenset({1}))
    assert list(example.dynamic_shapes._shapes) == [id(x)]
    assert list(examples((x,), {}, frozenset({0}))) == []
    assert list(examples((3,), {}, frozenset())) == []


def test_what_no_backward_pass_may_save_is_copied() -> None:
    with torch.inference_mode():
        x = torch.ones(2, 3)
    y = torch.ones(2, 3)
    (mine, same, again), named = traceable_arguments((x, y, y), {"z": x})
    assert torch.equal(mine, x)
    assert not mine.is_inference()
    assert not named["z"].is_inference()
    assert same is y
    assert again is not y
