from __future__ import annotations

import torch

from partita.capture.open_sizes.sizes import Condition, Size, Sizes, Symbol
from partita.capture.proving.samples import samples

IDS = torch.tensor([[5, 9, 7, 5], [6, 6, 8, 9]])
MASK = torch.ones(2, 4, dtype=torch.long)
OPEN = Sizes(
    symbols=(Symbol("batch", "ids", 0),),
    shapes={"ids": (Size("batch"), 4), "mask": (Size("batch"), 4)},
)


def test_the_example_comes_first_as_it_is() -> None:
    first = next(samples((IDS,), {"attention_mask": MASK}, Sizes(), ["ids", "mask"]))
    assert first.kind == "the example"
    assert first.args[0] is IDS
    assert first.kwargs["attention_mask"] is MASK
    assert not first.other_weights


def test_a_mask_comes_with_padding_and_without() -> None:
    _, padded, unpadded = samples((IDS,), {"attention_mask": MASK}, OPEN, ["ids", "mask"])
    mask = padded.kwargs["attention_mask"]
    assert mask.shape == (3, 4)
    assert mask.dtype == torch.long
    assert 0 < mask.sum() < 12
    assert bool((mask[:, :2] == 1).all())
    assert bool((unpadded.kwargs["attention_mask"] == 1).all())
    assert unpadded.kwargs["attention_mask"].shape == (2, 4)


def test_integers_are_those_of_the_example() -> None:
    _, other = samples((IDS,), {}, Sizes(), ["ids"])
    assert set(other.args[0].flatten().tolist()) <= set(IDS.flatten().tolist())
    assert not torch.equal(other.args[0], IDS)
    assert other.gentle is not None
    assert torch.equal(other.gentle.args[0], IDS.roll(-1, 0))


def test_integers_of_an_open_length_repeat_those_of_the_example() -> None:
    """The rows were expanded to the other length, and torch's error about that ended the capture."""
    long = Sizes(
        symbols=(Symbol("batch", "ids", 0), Symbol("length", "ids", 1)),
        shapes={"ids": (Size("batch"), Size("length"))},
    )
    _, other = samples((IDS,), {}, long, ["ids"])
    assert other.gentle is not None
    assert other.gentle.args[0].tolist() == [[6, 6, 8, 9, 6], [5, 9, 7, 5, 5], [6, 6, 8, 9, 6]]


def test_numbers_stay_in_the_range_of_the_example() -> None:
    values = torch.rand(5, 3).requires_grad_()
    _, other = samples((values,), {}, Sizes(), ["x"])
    assert values.min() <= other.args[0].min()
    assert other.args[0].max() <= values.max()
    assert other.args[0].requires_grad
    assert other.other_weights


def test_two_valued_and_infinite_numbers_are_drawn_from_the_example() -> None:
    bias = torch.tensor([[0.0, float("-inf")], [0.0, 0.0]])
    _, other = samples((bias,), {}, Sizes(), ["bias"])
    assert set(other.args[0].flatten().tolist()) <= {0.0, float("-inf")}


def test_a_condition_on_sizes_is_met() -> None:
    closed = Sizes(symbols=OPEN.symbols, shapes=OPEN.shapes, conditions=(Condition("batch < 3", "here"),))
    _, other = samples((IDS,), {}, closed, ["ids"])
    assert other.args[0].shape == (2, 4)


def test_numbers_in_python_and_empty_tensors_stay() -> None:
    _, other = samples((3, torch.zeros(0, 2)), {"flag": True}, Sizes(), ["n", "x", "flag"])
    assert other.args[0] == 3
    assert other.args[1].shape == (0, 2)
    assert other.kwargs == {"flag": True}


def test_sparse_tensors_stay_as_they_are() -> None:
    edges = torch.eye(3).to_sparse()
    _, other = samples((edges,), {}, Sizes(), ["edges"])
    assert other.args[0] is not edges
    assert torch.equal(other.args[0].to_dense(), torch.eye(3))
