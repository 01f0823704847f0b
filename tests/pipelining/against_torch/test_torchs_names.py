"""Names that torch does not make public, and that programs or torch's own tests import."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed.pipelining as their_package
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as their_backward
from torch.distributed.pipelining import _utils as their_utils
from torch.distributed.pipelining import microbatch as their_microbatch
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining import stage as their_stage
from torch.nn.attention.flex_attention import create_block_mask

from partita import pipelining as package
from partita.errors import MicrobatchError, ScheduleError
from partita.pipelining import _IR, _backward, _utils, microbatch, schedules, stage
from partita.planning import Action, get_schedule, lower, validate
from partita.planning import Schedule as Plan

ORDER = {0: ["0F0", "0F1", None, "0B0", "0B1"], 1: [None, "1F0", "1B0", "1F1", "1B1"]}


def test_functions_and_methods_take_their_arguments_by_torchs_names() -> None:
    """Seven did not: ``TensorChunkSpec(split_dim=1)`` was a TypeError."""
    modules = ((their_package, package), (their_microbatch, microbatch), (theirs, schedules))
    pairs = [
        (getattr(there, name), getattr(here, name))
        for there, here in modules
        for name in here.__all__
        if not name.startswith("_")
        if callable(getattr(there, name, None)) and getattr(there, name).__module__.startswith("torch.distr")
    ]
    pairs += [
        (getattr(kind, method), getattr(ours, method))
        for kind, ours in pairs
        if isinstance(kind, type)
        for method in vars(kind)
        if not method.startswith("_") and callable(getattr(kind, method)) and hasattr(ours, method)
    ]
    assert (their_microbatch.TensorChunkSpec.from_dict, package.TensorChunkSpec.from_dict) in pairs
    others = [
        function
        for function, ours in pairs
        if not set(signature(function).parameters) <= set(signature(ours).parameters)
    ]
    assert others == [their_package.Pipe]  # which pipeline() makes


@pytest.mark.parametrize("name", _IR.__all__)
def test_names_of_the_models_module_are_those_of_the_package(name: str) -> None:
    assert getattr(_IR, name) is getattr(package, name)


def test_sends_and_receives_are_added_and_what_is_given_stays() -> None:
    order = copy.deepcopy(ORDER)
    lowered_rows = schedules._add_send_recv(order, lambda stage: stage, 2)
    assert order == ORDER
    text = "".join(",".join("" if cell is None else cell for cell in row) + "\n" for row in ORDER.values())
    lowered = lower(Plan.from_csv(text))
    assert lowered_rows == {rank: list(lowered.actions(rank)) for rank in range(2)}
    there = {
        rank: [None if cell is None else theirs._Action.from_str(cell) for cell in row]
        for rank, row in ORDER.items()
    }
    expected = theirs._add_send_recv(there, lambda stage: stage, 2)  # type: ignore[arg-type]
    for rank, row in lowered_rows.items():
        assert {str(action) for action in row} == {str(action) for action in expected[rank]}
    validate(Plan("theirs", (0, 1), 2, tuple(tuple(row) for row in lowered_rows.values())))


def test_an_order_is_validated_and_its_stages_found() -> None:
    v = get_schedule("ZBVZeroBubble")(stages=4, microbatches=4, ranks=2)
    order = dict(enumerate(v.rows))
    assert schedules._validate_schedule(order, 2, 4, 4) == {0: 0, 1: 1, 2: 1, 3: 0}
    assert schedules._validate_schedule(ORDER, 2, 2, 2) == {0: 0, 1: 1}
    for actions, numbers, message in (
        (order, (3, 4, 4), "the actions are for 2 ranks, not 3"),
        (order, (2, 5, 4), "the actions are for 4 stages, not 5"),
        (order, (2, 4, 5), "there is no forward pass; add 0F4"),
        ({1: ["0F0"]}, (1, 1, 1), r"the ranks are \[1\]: give the actions of each, counted from 0"),
        ({0: ["0B0", "0F0"]}, (1, 1, 1), "it needs 0F0, which is at position 1; move it before"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedules._validate_schedule(actions, *numbers)


def test_an_order_is_shown_as_a_table() -> None:
    assert schedules._format_pipeline_order(ORDER, 1).splitlines() == [
        "        Rank 0 Rank 1",
        "Step 0: 0F0",
        "Step 1: 0F1    1F0    <-- here",
        "Step 2:        1B0",
        "Step 3: 0B0    1F1",
        "Step 4: 0B1    1B1",
    ]


def test_passes_over_a_row_are_those_of_planning() -> None:
    row = [Action.parse(text) for text in ("0F0", "0I0", "0W0")]
    assert list(map(str, schedules._merge_bw(row))) == ["0F0", "0B0"]
    assert [str(it) for it in schedules._add_reduce_grad(row, 1)] == ["0F0", "0I0", "0W0", "0REDUCE_GRAD"]
    assert [str(it) for it in schedules._add_unshard_reshard(row)][::4] == ["0UNSHARD", "0RESHARD"]


@pytest.mark.parametrize(("style", "stages"), [("loop", 2), ("loop", 6), ("v", 4)])
def test_stages_are_placed_as_there(style: str, stages: int) -> None:
    for name in ("generate_stage_to_rank_mapping", "generate_rank_to_stage_mapping"):
        assert getattr(_utils, name)(2, stages, style) == getattr(their_utils, name)(2, stages, style)


def test_a_style_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ScheduleError, match="style is 'zigzag': give 'loop' or 'v'"):
        _utils.generate_stage_to_rank_mapping(2, 4, "zigzag")


def test_arguments_are_flattened_as_there() -> None:
    x = torch.ones(2, requires_grad=True)
    args = (x * 2, {"y": [1, x.detach()]})
    assert_equal(_utils.flatten_args(args), their_utils.flatten_args(args))


@pytest.mark.skipif(
    "detach" not in signature(their_utils.flatten_args).parameters,
    reason="torch 2.11's own flatten_args does not detach",
)
def test_flattened_arguments_are_detached_as_there() -> None:
    x = torch.ones(2, requires_grad=True)
    args = (x * 2, {"y": [1, x.detach()]})
    for actual, expected in zip(
        _utils.flatten_args(args, detach=True), their_utils.flatten_args(args, detach=True), strict=True
    ):
        assert_equal(actual, expected)
    nested, flat = _utils.flatten_args(args, detach=True)
    assert nested[0] is flat[0]
    assert (flat[0].is_leaf, flat[0].requires_grad, flat[2].requires_grad) == (True, True, False)


@pytest.mark.parametrize("output", [1, (1, 2), [1, 2], {"x": 1}, None])
def test_what_a_stage_returns_is_made_a_tuple_as_there(output: Any) -> None:
    actual = stage._normalize_model_output_as_tuple(output)
    assert actual == their_stage._normalize_model_output_as_tuple(output)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_mask_is_cut_as_there(batch: int) -> None:
    def of_the_first_samples(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (b < 1) & (q >= kv)

    mask = create_block_mask(of_the_first_samples, batch, None, 128, 128, device="cpu")
    actual, expected = (module._split_block_mask(mask, 2) for module in (microbatch, their_microbatch))
    numbers = torch.arange(max(1, batch // 2)), *(torch.tensor(0) for _ in range(3))
    for here, there in zip(actual, expected, strict=True):
        assert isinstance(here, microbatch.BlockMask)
        assert here.shape == there.shape
        assert_equal(here.to_dense(), there.to_dense())
        assert_equal(here.mask_mod(*numbers), there.mask_mod(*numbers))
    if batch > 1:
        with pytest.raises(MicrobatchError, match="a batch of 4 can't fill 5 microbatches"):
            microbatch._split_block_mask(mask, 5)


def test_results_are_summed_as_there() -> None:
    chunks = [(torch.tensor(1.5),), (torch.tensor(2.0),)]
    actual, expected = (
        module.merge_chunks(chunks, (module.sum_reducer,)) for module in (microbatch, their_microbatch)
    )
    assert_equal(tuple(actual), tuple(expected))
    assert microbatch.DEFAULT_CHUNK_DIM == their_microbatch.DEFAULT_CHUNK_DIM


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor | int]]:
        h = self.first(x).relu()
        return self.last(h) * y, {"h": h + 1, "count": 2}


def _backward_pass(module: Any, *, split: bool) -> Any:
    block = _Block()
    inputs = [torch.ones(2, 4, requires_grad=True), torch.full((2, 4), 2.0), 3]
    out, more = block(*inputs[:2])
    seed = torch.arange(8.0).reshape(2, 4)
    if split:
        gradients, groups = module.stage_backward_input(
            (out, more["h"]), (seed, seed), inputs, block.parameters()
        )
        assert [it.grad for it in block.parameters()] == [None] * 4
        assert_equal(inputs[0].grad, gradients[0])
        module.stage_backward_weight(block.parameters(), groups)
    else:
        gradients = module.stage_backward((out, more), (seed, {"h": seed, "count": None}), inputs)
        assert inputs[0].grad is None
    return list(gradients), [it.grad for it in block.parameters()]


@pytest.mark.parametrize("split", [False, True])
def test_a_module_goes_back_as_there(split: bool) -> None:
    if split and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("stage_backward_input of torch 2.11 and 2.12 takes no input but tensors")
    actual, expected = (_backward_pass(module, split=split) for module in (_backward, their_backward))
    assert_equal(actual, expected)


def test_a_loss_goes_back_without_a_gradient_and_weights_gradients_are_returned() -> None:
    def gradients(module: Any, *, split: bool) -> Any:
        block, x = _Block(), torch.ones(2, 4, requires_grad=True)
        loss = block(x, torch.ones(2, 4))[0].sum()
        if not split:
            return module.stage_backward(loss, None, [x])[0]
        input_gradients, groups = module.stage_backward_input((loss,), None, [x], block.parameters())
        weights = module.stage_backward_weight(block.parameters(), groups)
        if module is _backward:  # torch returns those of before
            assert_equal(list(weights), [it.grad for it in block.parameters()])
        return input_gradients[0], [it.grad for it in block.parameters()]

    for split in (False, True):
        assert_equal(gradients(_backward, split=split), gradients(their_backward, split=split))
