"""Where torch's ``cudagraphs`` backend and partitioner are wrong: each test first shows that they (still)
are, then that partita is right. The graphs have example values on a GPU, and run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cudagraphs.capturing import CountingRecorder, capturing
from tests.cudagraphs.graphs import Builder, aten, build, sync
from torch import nn
from torch._dynamo.backends import cudagraphs as torch_backend
from torch._dynamo.backends.cudagraphs import check_for_skip
from torch._dynamo.backends.cudagraphs import find_input_mutations as torch_find_input_mutations
from torch._inductor import cudagraph_trees
from torch.fx import GraphModule, Node
from torch.fx.passes.backends.cudagraphs import CudaGraphsSupport
from torch.fx.passes.backends.cudagraphs import partition_cudagraphs as torch_partition_cudagraphs

from partita.cudagraphs import find_input_mutations, find_regions, partition_cudagraphs

set_grad = torch._C._set_grad_enabled
Partitioner = Callable[..., GraphModule]


def agrees(partitioner: Partitioner, function: Callable[..., Any], *, grad: bool = False) -> bool:
    """Whether the partitioned graph does what the whole does."""
    x = torch.arange(16.0).view(4, 4).requires_grad_(grad)
    whole = build(function)
    example = whole.graph.find_nodes(op="placeholder")[0].meta["val"]
    try:
        torch.manual_seed(0)
        expected = build(function)(x.clone())
        parts = partitioner(whole, [example])
        torch.manual_seed(0)
        actual = parts(x.clone())
        return torch.is_grad_enabled() and all(
            torch.equal(a, b) and a.requires_grad == b.requires_grad
            for a, b in zip(expected, actual, strict=True)
        )
    finally:
        torch.set_grad_enabled(True)


def mutation(b: Builder, x: Node) -> tuple[Node, ...]:
    """x is read between two regions, and written afterwards."""
    before = b.call(aten.neg.default, x)
    read = sync(b, x)
    return before, read, b.call(aten.add_.Tensor, x, 1.0)


def randomness(b: Builder, x: Node) -> tuple[Node, ...]:
    """Three draws, two of which could go with different regions."""
    first = b.call(aten.bernoulli.p, x, 0.5)
    second = b.call(aten.bernoulli.p, x, 0.5)
    between = sync(b, second)
    sine = b.call(aten.sin.default, between)
    third = b.call(aten.bernoulli.p, second, 0.5)
    return first, second, sine, third, b.call(aten.sin.default, x)


def grad_mode(b: Builder, x: Node) -> tuple[Node, ...]:
    """Only the first node stands under no_grad."""
    b.call(set_grad, False)
    first = b.call(aten.cos.default, x)
    b.call(set_grad, True)
    between = sync(b, x)
    return first, b.call(aten.sin.default, between), b.call(aten.sin.default, x)


def grad_mode_leaks(b: Builder, x: Node) -> tuple[Node, ...]:
    b.call(set_grad, False)
    first = b.call(aten.cos.default, x)
    b.call(set_grad, True)
    between = sync(b, first)
    return first, between, b.call(aten.sin.default, between)


def test_a_read_keeps_its_place_before_a_write() -> None:
    assert not agrees(torch_partition_cudagraphs, mutation)
    assert agrees(partition_cudagraphs, mutation)


def test_random_numbers_are_drawn_in_order() -> None:
    assert not agrees(torch_partition_cudagraphs, randomness)
    assert agrees(partition_cudagraphs, randomness)


def test_grad_mode_holds_where_it_held() -> None:
    assert not agrees(torch_partition_cudagraphs, grad_mode_leaks, grad=True)
    assert agrees(partition_cudagraphs, grad_mode_leaks, grad=True)
    assert agrees(partition_cudagraphs, grad_mode, grad=True)


def item(b: Builder, x: Node) -> Node:
    return b.call(aten.item.default, b.call(aten.sum.default, x))


def nonzero(b: Builder, x: Node) -> Node:
    return b.call(aten.nonzero.default, x)


def mask_write(b: Builder, x: Node) -> Node:
    mask = b.call(aten.gt.Scalar, x, 0)
    return b.call(aten.index_put.default, x, [mask], b.call(aten.select.int, x, 0, 0))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (item, "the host reads a value from the device"),
        (nonzero, "the shape of its result depends on the data"),
        (mask_write, "it indexes by a mask"),
    ],
)
def test_what_waits_for_the_device_is_not_captured(function: Callable[..., Any], reason: str) -> None:
    gm = build(function)
    node = list(gm.graph.nodes)[-2]
    assert CudaGraphsSupport().is_node_supported({}, node)  # and the capture would fail
    refusals = find_regions(gm).refusals
    assert [refusal.node for refusal in refusals] == [node.name]
    assert reason in refusals[0].reason


def test_a_0d_cpu_operand_does_not_split_the_graph() -> None:
    b = Builder()
    x, scale = b.input("x", b.fake(4, 4)), b.input("scale", b.fake(device="cpu"))
    scaled = b.call(aten.mul.Tensor, b.call(aten.sin.default, x), scale)
    gm = b.module(b.call(aten.cos.default, scaled))
    assert not CudaGraphsSupport().is_node_supported({}, scaled)
    assert check_for_skip(gm, 0) is not None  # torch's backend leaves out everything
    plan = find_regions(gm)
    assert [region.nodes for region in plan.regions] == [("sin", "mul", "cos")]
    assert not plan.refusals


def test_one_uncapturable_node_costs_only_itself_and_says_why() -> None:
    def function(b: Builder, x: Node) -> Node:
        before = b.call(aten.sin.default, b.call(aten.neg.default, x))
        on_host = b.call(aten._to_copy.default, before, device=torch.device("cpu"), line=7)
        back = b.call(aten._to_copy.default, on_host, device=torch.device("cuda", 0))
        return b.call(aten.cos.default, b.call(aten.exp.default, back))

    gm = build(function)
    why = check_for_skip(gm, 0)  # the whole graph is skipped
    assert why is not None
    assert "cpu device (_to_copy)" in why
    assert "instead" not in why
    assert "create" not in why  # nor any other way out
    plan = find_regions(gm)
    assert [region.nodes for region in plan.regions] == [("neg", "sin"), ("exp", "cos")]
    assert str(plan.refusals[0]) == (
        "_to_copy (aten._to_copy.default) at model.py:7: code of line 7: its result lies on cpu; "
        "create it on the cuda device, or move this before or after the model"
    )


def test_lists_of_tensors_are_seen_as_written() -> None:
    def function(b: Builder, x: Node) -> Node:
        b.call(aten._foreach_add_.Scalar, [x], 1)
        return x

    gm = build(function)
    with pytest.raises(AttributeError):
        torch_find_input_mutations(gm.graph)
    assert find_input_mutations(gm.graph) == {0}


def test_parameters_are_not_copied_at_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed: list[list[int]] = []

    def record(model: Any, _inputs: Any, static_input_idxs: Any, **_: Any) -> Any:
        fixed.append(list(static_input_idxs))
        return model

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", record)
    monkeypatch.setattr(torch_backend, "check_for_skip", lambda *_: None)
    monkeypatch.setattr(torch_backend, "get_device_index", lambda _: 0)
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with torch.no_grad():
        torch.compile(model, backend="cudagraphs")(x)
    assert fixed == [[]]  # weight and bias are inputs like any other
    torch.compiler.reset()
    recorder = CountingRecorder()
    ours = torch.compile(model, backend=capturing(recorder=lambda _device: recorder))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(ours(x), model(x))
    assert recorder.copied == [(2, 3)]  # x


def test_recordings_of_new_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []

    def record(model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        recorded.append(inputs[0])
        return model, model(inputs)

    monkeypatch.setattr(cudagraph_trees, "cudagraphify", record)
    monkeypatch.setattr(cudagraph_trees, "maybe_warning_due_to_dynamic_shape", lambda *_: False)
    theirs = cudagraph_trees.cudagraphify_impl(lambda inputs: inputs[1] * 2, [1, torch.ones(1)], [])
    sizes = [*range(1, 41), 1]
    for size in sizes:
        theirs([size, torch.ones(size)])
    assert recorded == list(range(1, 41))  # 40 recordings, and all of them are kept
    torch.compiler.reset()
    backend = capturing(max_recordings=4)
    ours = torch.compile(lambda x: x * 2, backend=backend, dynamic=True)
    for size in sizes:
        for _ in range(3):
            assert torch.equal(ours(torch.ones(size + 1)), torch.full((size + 1,), 2.0))
    (info,) = (info for graph in backend.graphs for info in graph.cache_info().values())
    assert (info.size, info.max_size) == (4, 4)
    assert info.recorded == len(sizes)
    assert info.evicted == len(sizes) - 4
