from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from partita.errors import MicrobatchError
from partita.runtime import (
    MicrobatchPlan,
    Reduce,
    Replicate,
    TensorChunkSpec,
    WeightedMean,
    cut_batch,
    merge,
    plan_microbatches,
    split_args,
    split_tree,
)


def test_an_empty_batch_is_refused_with_what_helps() -> None:
    """It said to use at most 0 microbatches."""
    with pytest.raises(MicrobatchError, match="a batch of 0 can't fill 2 microbatches: give a larger batch"):
        split_args((torch.zeros(0, 3),), None, 2)


def test_one_microbatch_is_the_arguments_as_they_are() -> None:
    """Nodes and edges of one graph were refused: they disagree about the size of a batch that is not cut."""
    nodes, edges, none = torch.zeros(10, 8), torch.zeros(2, 30), torch.zeros(0, 3)
    batch = cut_batch((nodes, edges), {"features": none}, 1)
    [((first, second), named)] = batch.trees()
    assert first is nodes
    assert second is edges
    assert named["features"] is none
    assert batch.plan.sizes == (10,)
    assert batch.sizes() == [(10,)]
    assert split_tree((nodes, edges), 1)[0] == [(nodes, edges)]
    with pytest.raises(MicrobatchError, match=r"disagree .*args\[0\] has 10, args\[1\] has 2\."):
        cut_batch((nodes, edges), None, 2)


@given(batch=st.integers(1, 40), chunks=st.integers(1, 12), dim=st.integers(-2, 1))
def test_merging_what_was_split_gives_the_whole_in_exactly_as_many_microbatches(
    batch: int, chunks: int, dim: int
) -> None:
    tensor = torch.arange(batch * 3).reshape(batch, 3)
    tensor = tensor if dim in {0, -2} else tensor.t()
    if batch < chunks:
        with pytest.raises(MicrobatchError, match=f"a batch of {batch} can't fill {chunks} microbatches"):
            split_args((tensor,), None, chunks, (TensorChunkSpec(dim),))
        return
    parts = [args[0] for args, _ in split_args((tensor,), None, chunks, (TensorChunkSpec(dim),))]
    assert len(parts) == chunks
    plan = plan_microbatches((tensor,), None, chunks, (TensorChunkSpec(dim),))
    assert tuple(part.shape[dim] for part in parts) == plan.sizes
    assert max(plan.sizes) - min(plan.sizes) <= 1
    assert sum(plan.weights) == pytest.approx(1.0)
    assert torch.equal(merge(parts, TensorChunkSpec(dim)), tensor)


def test_nested_arguments_are_cut_leaf_by_leaf_and_the_rest_is_replicated() -> None:
    args = ({"ids": torch.arange(4), "names": ["a", None]}, 7)
    kwargs = {"mask": torch.ones(1, 8), "scale": torch.tensor(2.0), "causal": True}
    first, second = split_args(args, kwargs, 2)
    assert first[0][0]["ids"].tolist() == [0, 1]
    assert second[0][0]["ids"].tolist() == [2, 3]
    for one_args, one_kwargs in (first, second):
        assert one_args[0]["names"] == ["a", None]
        assert one_args[1] == 7
        assert one_kwargs["mask"] is kwargs["mask"]
        assert one_kwargs["scale"] is kwargs["scale"]
        assert one_kwargs["causal"] is True


def test_a_spec_can_stop_above_the_leaves_and_hold_for_all_below() -> None:
    args = ([torch.zeros(3, 4), torch.zeros(2, 4)], torch.zeros(9))
    parts = split_args(args, {}, 2, (TensorChunkSpec(1), Replicate()))
    assert [tuple(t.shape) for t in parts[0][0][0]] == [(3, 2), (2, 2)]
    assert parts[0][0][1] is args[1]


def test_specs_can_be_made_from_bare_dims() -> None:
    assert TensorChunkSpec.from_tuple((0, 1)) == (TensorChunkSpec(0), TensorChunkSpec(1))
    assert TensorChunkSpec.from_dict({"x": 2}) == {"x": TensorChunkSpec(2)}


def test_arguments_without_a_batch_go_whole_to_every_microbatch() -> None:
    assert split_args((3,), {"y": "z"}, 2) == [((3,), {"y": "z"})] * 2
    assert plan_microbatches((3,), None, 4).weights == (0.25,) * 4


@pytest.mark.parametrize(
    ("args", "kwargs", "specs", "text"),
    [
        ((torch.zeros(4), torch.zeros(6)), {}, {}, r"args\[0\] has 4, args\[1\] has 6"),
        ((torch.zeros(4),), {"m": [torch.zeros(5)]}, {}, r"args\[0\] has 4, kwargs\['m'\]\[0\] has 5"),
        ((torch.zeros(4),), {}, {"args_spec": (TensorChunkSpec(1),)}, r"args\[0\] has 1 dimensions .* dim 1"),
        ((torch.zeros(4),), {}, {"args_spec": (None, None)}, "args_spec does not have the structure"),
        ((torch.zeros(4),), {}, {"kwargs_spec": {"x": None}}, r"kwargs_spec names \['x'\]"),
        ((torch.zeros(4),), {}, {"args_spec": (WeightedMean((1.0,)),)}, "WeightedMean is for results"),
    ],
)
def test_arguments_that_cannot_be_cut_are_refused_by_name(
    args: Any, kwargs: Any, specs: Any, text: str
) -> None:
    with pytest.raises(MicrobatchError, match=text):
        split_args(args, kwargs, 2, **specs)


def test_less_than_one_microbatch_is_refused() -> None:
    with pytest.raises(MicrobatchError, match="at least one microbatch, not 0"):
        split_args((torch.zeros(2),), None, 0)
    with pytest.raises(MicrobatchError, match=r"sizes are \(2, 0\)"):
        MicrobatchPlan((2, 0))


def test_results_are_concatenated_stacked_reduced_averaged_or_compared() -> None:
    outputs = [
        {"y": torch.ones(2, 3), "loss": torch.tensor(1.0), "aux": torch.tensor(3.0), "n": 2, "k": "same"},
        {"y": torch.zeros(1, 3), "loss": torch.tensor(4.0), "aux": torch.tensor(5.0), "n": 1, "k": "same"},
    ]
    specs = {
        "y": None,
        "loss": WeightedMean((2 / 3, 1 / 3)),
        "aux": None,
        "n": Reduce(int.__add__, 0),
        "k": None,
    }
    merged = merge(outputs, specs)
    assert merged["y"].shape == (3, 3)
    assert merged["loss"].item() == pytest.approx(2.0)
    assert merged["aux"].tolist() == [3.0, 5.0]
    assert merged["n"] == 3
    assert merged["k"] == "same"


def test_results_of_other_sizes_are_an_error_that_says_how_they_can_be_had() -> None:
    """A model whose data says how long its output is: torch's error about sizes came out of the step."""
    outputs = [torch.zeros(2, 3), torch.ones(2, 5)]
    with pytest.raises(
        MicrobatchError, match=r"shapes \[2, 3\], \[2, 5\], can't be joined along dimension 0"
    ):
        merge(outputs)
    with pytest.raises(MicrobatchError, match=r"output\['y'\] of the microbatches"):
        merge([{"y": output} for output in outputs])
    parts = merge(outputs, Reduce(lambda parts, value: [*parts, value], []))
    assert all(left is right for left, right in zip(parts, outputs, strict=True))


def test_results_that_differ_where_they_must_not_are_named() -> None:
    with pytest.raises(MicrobatchError, match=r"output\['n'\] differs between microbatches \(1, 2\)"):
        merge([{"n": 1}, {"n": 2}])
    with pytest.raises(MicrobatchError, match="output differs"):
        merge([torch.zeros(2), torch.ones(2)], Replicate())
    with pytest.raises(MicrobatchError, match="microbatch 1 returns"):
        merge([(1, 2), (1,)])
    with pytest.raises(MicrobatchError, match="1 weights for 2 microbatches"):
        merge([torch.zeros(()), torch.ones(())], WeightedMean((1.0,)))
    with pytest.raises(MicrobatchError, match="nothing to merge"):
        merge([])


def _dense(mask: BlockMask) -> Tensor:
    rows = torch.arange(mask.seq_lengths[0])
    batch = torch.arange(mask.kv_num_blocks.shape[0])[:, None, None]
    return mask.mask_mod(batch, torch.zeros((), dtype=torch.int64), rows[:, None], rows).expand(
        len(batch), len(rows), len(rows)
    )


def test_a_block_mask_is_cut_with_the_function_that_it_is_made_of() -> None:
    """Only the tensors were cut: the second microbatch had the masks of the first one's samples."""
    lengths = torch.tensor([3, 100, 57, 128, 1])
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (k < lengths[b]), 5, None, 128, 128, device="cpu")
    x = torch.zeros(5, 2)
    parts = split_args((x, {"mask": mask}), {"again": mask}, 2)
    for masks in ([args[1]["mask"] for args, _ in parts], [kwargs["again"] for _, kwargs in parts]):
        assert torch.equal(torch.cat([_dense(part) for part in masks]), _dense(mask))
        assert torch.equal(torch.cat([part.kv_indices for part in masks]), mask.kv_indices)
    targets, _ = split_tree({"mask": mask}, 2)  # was about the first microbatch in all of them
    assert torch.equal(torch.cat([_dense(target["mask"]) for target in targets]), _dense(mask))
    broadcast = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    for args, _ in split_args((x, broadcast), None, 5):
        assert torch.equal(_dense(args[1]), _dense(broadcast))
    spec = (None, TensorChunkSpec(0))  # cut by itself: 5 masks beside 3 samples
    masks = [args[1] for args, _ in split_args((x[:3], mask), None, 2, spec)]
    assert [len(part.kv_num_blocks) for part in masks] == [3, 2]
    assert torch.equal(torch.cat([_dense(part) for part in masks]), _dense(mask))


def test_tensors_with_a_spec_are_each_cut_by_themselves() -> None:
    x, y, z = torch.arange(128), torch.arange(256), torch.arange(2 * 511).view(2, 511)
    spec = (TensorChunkSpec(0), TensorChunkSpec(0), TensorChunkSpec(1))
    first, second = (parts for parts, _ in split_args((x, y, z), None, 2, spec))
    assert [part.shape for part in first] == [(64,), (128,), (2, 256)]
    assert [part.shape for part in second] == [(64,), (128,), (2, 255)]
    for dim, whole, *parts in (
        (0, x, first[0], second[0]),
        (0, y, first[1], second[1]),
        (1, z, first[2], second[2]),
    ):
        assert torch.equal(torch.cat(parts, dim), whole)
    assert cut_batch((x, y, z), None, 2, spec).sizes() == [(64, 128, 256), (64, 128, 255)]


def test_samples_are_those_of_the_tensors_without_a_spec() -> None:
    tokens, images = torch.zeros(5), torch.zeros(9)
    specs = (TensorChunkSpec(0), None)
    assert plan_microbatches((images, tokens), None, 2, specs).sizes == (3, 2)
    assert plan_microbatches((images,), {"tokens": tokens}, 2, specs[:1]).sizes == (3, 2)
    with pytest.raises(
        MicrobatchError, match=r"disagree .*args\[1\] has 5, args\[2\] has 7\. Give a TensorChunkSpec"
    ):
        split_args((images, tokens, torch.zeros(7)), None, 2, (*specs, None))
    with pytest.raises(MicrobatchError, match=r"args\[0\] has 3 rows, which can't be cut for 4 microbatches"):
        split_args((images[:3], tokens), None, 4, specs)
