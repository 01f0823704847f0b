from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cudagraphs.capturing import capturing
from tests.cudagraphs.graphs import CPU, Builder, aten, build, random_graph, sync
from torch.fx import Node, symbolic_trace

from partita.cudagraphs import partition_cudagraphs
from partita.errors import GraphError


def modules(gm: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_module"]


def alike(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Equal values, strides and sharing of memory."""

    def shape(values: tuple[torch.Tensor, ...]) -> list[object]:
        first: dict[int, int] = {}
        return [
            (
                first.setdefault(value.untyped_storage().data_ptr(), number),
                value.stride(),
                value.storage_offset(),
            )
            for number, value in enumerate(values)
        ]

    return shape(a) == shape(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_partitioned_graph_does_what_the_whole_does(seed: int) -> None:
    gm = build(random_graph(seed))
    cut = partition_cudagraphs(gm, [gm.graph.find_nodes(op="placeholder")[0].meta["val"]])
    ours, theirs = torch.randn(4, 4), None
    theirs = ours.clone()
    torch.manual_seed(seed)
    actual = cut(ours)
    torch.manual_seed(seed)
    expected = gm(theirs)
    assert alike((ours, *actual), (theirs, *expected))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_captured_graph_does_what_the_whole_does_at_every_replay(seed: int) -> None:
    gm = build(random_graph(seed), device=CPU)
    captured = capturing().capture(gm)
    earlier: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = []
    for step in range(4):
        ours = torch.randn(4, 4)
        theirs = ours.clone()
        torch.manual_seed(step)
        actual = captured(ours)
        torch.manual_seed(step)
        expected = gm(theirs)
        earlier.append(((ours, *actual), (theirs, *expected)))
        assert all(alike(a, b) for a, b in earlier)


def test_regions_are_submodules_and_the_rest_stays_in_place() -> None:
    def function(b: Builder, x: Node) -> Node:
        return b.call(aten.cos.default, sync(b, b.call(aten.sin.default, x)))

    gm = build(function)
    cut = partition_cudagraphs(gm, [gm.graph.find_nodes(op="placeholder")[0].meta["val"]])
    assert modules(cut) == ["fused_0", "fused_1"]
    assert [name for name, _ in cut.named_children()] == ["fused_0", "fused_1"]
    assert any(node.target is aten.embedding_dense_backward.default for node in cut.graph.nodes)
    assert cut.meta["partition_names"] == {"fused_0", "fused_1"}
    assert len(gm.graph.nodes) == 7  # as it was


def test_a_graph_without_example_values_gets_them_from_the_inputs() -> None:
    gm = symbolic_trace(lambda x: torch.relu(x).sum())
    b = Builder()
    cut = partition_cudagraphs(gm, [b.fake(3, 3)])
    assert modules(cut) == ["fused_0"]
    assert not any("val" in node.meta for node in gm.graph.nodes)
    assert cut(torch.ones(2, 2)).item() == 4.0


def test_prints_are_not_run_to_find_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(print, ("seen",))
    graph.output(graph.call_function(torch.sin, (x,)))
    cut = partition_cudagraphs(torch.fx.GraphModule({}, graph), [Builder().fake(2)])
    assert not capsys.readouterr().out
    assert "the host can see what it does" in cut.meta["partita_regions"].refusals[0].reason
    cut(torch.zeros(2))
    assert capsys.readouterr().out == "seen\n"


def test_parameters_of_pieces_between_regions_stay_reachable() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("shift", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum().item() + self.shift

    gm = symbolic_trace(Net())
    cut = partition_cudagraphs(gm, [torch.ones(2)])  # on the CPU nothing is captured
    assert not modules(cut)
    assert cut(torch.ones(2)).tolist() == [3.0, 3.0]
    assert cut.weight is gm.weight


def test_wrong_arguments_are_refused() -> None:
    gm = symbolic_trace(lambda x, y: x + y)
    with pytest.raises(GraphError, match=r"the graph has 2 inputs \(x, y\), got 1 values"):
        partition_cudagraphs(gm, [torch.ones(1)])
    with pytest.raises(GraphError, match=r"takes a torch\.fx\.GraphModule, got Linear"):
        partition_cudagraphs(torch.nn.Linear(1, 1), [])
