"""Which compiled piece of a pipe differs first, with a compiler that makes one mistake."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from partita.errors import NotCompiled
from partita.pipelining import SplitPoint, pipeline
from partita.pipelining.interface.compile_options import compile_options
from partita.verification import Verification, verify

CUTS = {"second": SplitPoint.BEGINNING, "third": SplitPoint.BEGINNING}
X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = self.second(x).tanh()
        return self.third(torch.dropout(x, 0.5, self.training)).sigmoid()


def compiler_that_spoils(operator: str, result: int) -> Callable[..., Any]:
    """Runs graphs as they are, but adds to one result of those with the operator, counted among tensors."""

    def compiled(gm: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        spoils = any(operator == str(node.target) for node in gm.graph.nodes)

        def run(*args: Any) -> Any:
            results = list(gm(*args))
            if spoils:
                tensors = [place for place, one in enumerate(results) if isinstance(one, torch.Tensor)]
                results[tensors[result]] = results[tensors[result]] + 0.5
            return results

        return run

    return compiled


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def verified(net: Net, compiler: Any) -> Verification:
    pipe = pipeline(net, (X,), split_spec=CUTS, compile=compiler, prove=False)
    return verify(pipe, net, (X,), mode="train")


def test_a_pipe_is_verified_as_it_is_compiled(net: Net) -> None:
    verified(net, "aot_eager").check()


def test_the_piece_whose_forward_pass_differs_is_named(net: Net) -> None:
    result = verified(net, compiler_that_spoils("aten.tanh.default", 0))
    first = next(one for one in result.differences if one.kind == "output")
    assert (first.piece, first.node) == ("submod_pp_1", "dropout")
    assert "first seen at node dropout in piece submod_pp_1: 12 of 12 elements differ" in str(result)


def test_the_piece_whose_backward_pass_differs_is_named(net: Net) -> None:
    result = verified(net, compiler_that_spoils("aten.tanh_backward.default", 0))
    first = result.differences[0]
    assert (first.kind, first.piece) == ("gradient", "submod_pp_1")
    assert "first seen at piece submod_pp_1: it computes the gradient of relu: " in first.message


def test_the_piece_that_computes_another_gradient_of_a_parameter_is_named(net: Net) -> None:
    result = verified(net, compiler_that_spoils("aten.tanh_backward.default", -1))
    (first,) = result.differences
    assert first.piece == "submod_pp_1"
    assert first.message.endswith("first seen at piece submod_pp_1: it computes the gradient of second.bias")


def test_where_the_captured_graph_is_not_the_model_no_piece_is_blamed(net: Net) -> None:
    pipe = pipeline(net, (X,), split_spec=CUTS, prove=False)
    other = Net()
    other.load_state_dict(net.state_dict())
    other.third.register_forward_hook(lambda *_: torch.zeros(3, 4))
    first = next(one for one in verify(pipe, other, (X,)).differences if one.kind == "output")
    assert first.piece is None
    assert "each piece computes what it does in the captured graph" in first.message


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True)
        return self.third(self.second(x - mean).tanh()).sigmoid()


def test_regions_that_each_piece_enters_by_itself_are_not_what_differs() -> None:
    """The first switch of the whole graph was said to have an effect and never to run."""
    pipe = pipeline(WithoutGradient(), (X,), split_spec=CUTS, prove=False)
    tanh = next(node for node in pipe.pieces[1].module.graph.nodes if node.name == "tanh")
    tanh.target = torch.sin
    pipe.pieces[1].module.recompile()
    (first, *_) = verify(pipe, pipe.whole, (X,), mode="train").differences
    assert (first.kind, first.piece, first.node) == ("output", "submod_pp_1", "tanh")


@pytest.mark.parametrize(
    ("compiled", "hinted"),
    [(True, True), ({"options": {"fallback_random": True}}, False), ("aot_eager", False), (None, False)],
)
def test_where_stages_draw_other_numbers_a_hint_says_so(net: Net, compiled: Any, hinted: bool) -> None:
    """Nothing is compiled: the pipe is not what is called, but a stand-in for its stages."""
    pipe = pipeline(net, (X,), split_spec=CUTS, prove=False)
    pipe.compile_options = compile_options(compiled)
    pipe.pieces[2].module.register_forward_hook(lambda *_: torch.zeros(3, 4))
    result = verify(pipe, net, (X,), mode="train", explain=False)
    assert not result.ok
    assert ("Inductor draws others than eager mode does" in str(result)) is hinted


def test_a_stage_that_runs_as_it_is_warns_when_it_is_verified(net: Net) -> None:
    """It was said to be equal, and nothing of what was compared had been compiled."""

    def refuses(*_: Any) -> Any:
        raise NotImplementedError("no such operator")

    pipe = pipeline(net, (X,), split_spec=CUTS, compile=refuses, prove=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        verify(pipe, net, (X,), mode="train").check()
    messages = [str(one.message) for one in warned if one.category is NotCompiled]
    assert [one.partition(":")[0] for one in messages] == [
        f"stage {stage} runs uncompiled, with the same results" for stage in range(3)
    ]
    assert {one.filename for one in warned} == {__file__}
