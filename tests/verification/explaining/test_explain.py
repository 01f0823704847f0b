"""Where the first difference comes from. The split is a stand-in: torch's tool, plus the fields read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.passes.split_module import split_module

from partita.verification import Verification, verify

X = torch.linspace(-1.0, 2.0, 12).reshape(3, 4)


@dataclass(frozen=True)
class Piece:
    name: str
    module: GraphModule
    node_names: tuple[str, ...]


@dataclass(frozen=True)
class StandIn:
    module: GraphModule
    pieces: tuple[Piece, ...]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        a = torch.relu(self.first(x))
        b = torch.dropout(a, 0.5, True)
        c = self.second(b * scale)
        low, high = torch.chunk(c, 2, dim=1)
        return {"low": low, "sum": low + high}


def cut(whole: GraphModule, borders: tuple[str, ...]) -> StandIn:
    number, of = 0, {}
    for node in whole.graph.nodes:
        number += node.name in borders
        of[node.name] = number
    stitched = split_module(whole, whole, lambda node: of[node.name], keep_original_node_name=True)
    pieces = tuple(
        Piece(name, piece, tuple(n.name for n in piece.graph.nodes if n.op not in ("placeholder", "output")))
        for name, piece in stitched.named_children()
        if isinstance(piece, GraphModule)
    )
    return StandIn(stitched, pieces)


@pytest.fixture
def whole() -> GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(Net())


def tamper(split: StandIn, name: str, change: Callable[[torch.fx.Node], object]) -> None:
    for piece in split.pieces:
        for node in piece.module.graph.nodes:
            if node.name == name:
                change(node)
                piece.module.recompile()
                return
    raise AssertionError(f"no node {name}")


def first(result: Verification) -> tuple[str, str | None, str | None]:
    assert not result.ok
    difference = result.differences[0]
    return difference.kind, difference.piece, difference.node


def test_a_split_equals_the_whole_and_names_are_matched(whole: GraphModule) -> None:
    split = cut(whole, ("dropout", "chunk"))
    assert len(split.pieces) == 3
    result = verify(split, whole, (X.clone().requires_grad_(),), {"scale": 2.0}).check()
    assert result.compared["gradients of parameters"] == 4


@pytest.mark.parametrize(
    ("node", "target", "piece"), [("relu", torch.sigmoid, "submod_0"), ("add", torch.sub, "submod_2")]
)
def test_the_first_node_that_differs_is_named_with_its_piece(
    whole: GraphModule, node: str, target: Any, piece: str
) -> None:
    split = cut(whole, ("dropout", "chunk"))
    tamper(split, node, lambda n: setattr(n, "target", target))
    result = verify(split, whole, (X,))
    assert first(result) == ("output", piece, node)
    assert f"first seen at node {node} in piece {piece}: " in str(result)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return _Double.apply(x)  # type: ignore[no-any-return]


def test_a_wrong_gradient_is_traced_to_the_node_where_it_first_arrives(whole: GraphModule) -> None:
    split = cut(whole, ("dropout", "chunk"))
    tamper(split, "relu", lambda n: setattr(n, "target", _doubled))
    # relu doubles what it passes back: its own gradient is right, that of what it was given is not.
    assert first(verify(split, whole, (X,))) == ("gradient", "submod_0", "first")


def test_a_node_that_draws_another_amount_is_named(whole: GraphModule) -> None:
    split = cut(whole, ("dropout", "chunk"))

    def greedy(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        dropped = torch.dropout(x, p, train)
        torch.rand(1)
        return dropped

    tamper(split, "dropout", lambda n: setattr(n, "target", greedy))
    assert first(verify(split, whole, (X,))) == ("random state", "submod_1", "dropout")


def test_a_node_that_draws_another_amount_on_a_gpu_is_named(
    whole: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the CPU's generator gives was looked at node by node."""
    gpus = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (gpus,))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: gpus.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: gpus.set_state(state))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", gpus.manual_seed)
    split = cut(whole, ("dropout", "chunk"))

    def greedy(x: torch.Tensor) -> torch.Tensor:
        torch.rand(1, generator=torch.cuda.default_generators[0])
        return torch.relu(x)

    tamper(split, "relu", lambda n: setattr(n, "target", greedy))
    result = verify(split, whole, (X,))
    assert first(result) == ("random state", "submod_0", "relu")
    assert "draws random numbers, unlike in the reference" in str(result)


def test_requires_grad_that_was_lost_is_traced(whole: GraphModule) -> None:
    split = cut(whole, ("dropout", "chunk"))
    tamper(split, "mul", lambda n: setattr(n, "target", lambda a, b: (a * b).detach()))
    result = verify(split, whole, (X,))
    assert {d.kind for d in result.differences} == {"gradient"}
    assert first(result)[1:] == ("submod_1", "mul")
    assert "requires_grad is False, not True" in str(result)


def test_a_stitched_module_without_its_split_is_explained_too(whole: GraphModule) -> None:
    split = cut(whole, ("dropout", "chunk"))
    tamper(split, "relu", lambda n: setattr(n, "target", torch.sigmoid))
    assert first(verify(split.module, whole, (X,))) == ("output", "submod_0", "relu")


def test_a_graph_is_explained_without_pieces(whole: GraphModule) -> None:
    other = symbolic_trace(whole)
    next(n for n in other.graph.nodes if n.name == "relu").target = torch.sigmoid
    other.recompile()
    assert first(verify(other, whole, (X,))) == ("output", None, "relu")


def test_an_effect_that_never_runs_is_named() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    torch_graph = symbolic_trace(Writes())
    reference = GraphModule(nn.Module(), torch.fx.Graph())
    x = reference.graph.placeholder("x")
    written = reference.graph.call_function(torch.ops.aten.add_.Tensor, (x, 1))
    reference.graph.output(reference.graph.call_function(torch.mul, (x, 2)))
    reference.recompile()
    assert verify(torch_graph, reference, (X,)).ok
    dead = GraphModule(nn.Module(), torch.fx.Graph())
    x = dead.graph.placeholder("x")
    dead.graph.output(dead.graph.call_function(torch.mul, (x, 2)))
    dead.recompile()
    result = verify(dead, reference, (X,))
    assert first(result) == ("output", None, written.name)
    assert "has an effect, and never runs in the candidate" in str(result)


def test_an_explanation_is_left_out_on_request_and_where_there_is_no_graph(whole: GraphModule) -> None:
    split = cut(whole, ("dropout",))
    tamper(split, "relu", lambda n: setattr(n, "target", torch.sigmoid))
    assert first(verify(split, whole, (X,), explain=False)) == ("output", None, None)
    assert first(verify(split, lambda x: whole(x), (X,))) == ("output", None, None)


def test_graphs_that_take_nested_arguments_are_explained() -> None:
    class Nested(nn.Module):
        def forward(self, pair: dict[str, torch.Tensor], *, bias: torch.Tensor) -> torch.Tensor:
            return torch.relu(pair["a"] + pair["b"]) * bias

    call = ({"a": X, "b": X},), {"bias": X}
    whole = torch.export.export(Nested(), *call).module()
    assert isinstance(whole, GraphModule)
    other = torch.export.export(Nested(), *call).module()
    assert isinstance(other, GraphModule)
    next(n for n in other.graph.nodes if n.name == "relu").target = torch.ops.aten.sigmoid.default
    other.recompile()
    assert verify(whole, whole, *call).ok
    assert first(verify(other, whole, *call)) == ("output", None, "relu")


def test_explaining_leaves_the_callers_things_alone(whole: GraphModule) -> None:
    split = cut(whole, ("dropout",))
    tamper(split, "relu", lambda n: setattr(n, "target", torch.sigmoid))
    before = torch.get_rng_state()
    assert not verify(split, whole, (X,)).ok
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in whole.parameters())
