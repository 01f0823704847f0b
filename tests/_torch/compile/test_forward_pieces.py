from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import SkipFrame
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import symbolic_trace

from partita._torch.compile.forward_pieces import (
    as_fake,
    compile_forward_piece,
    copy_module,
    inherit_marks,
    must_reach_dynamo,
    run_fake,
    with_strides_of,
)
from partita.ddp import DDPOptimizer


def test_tensors_become_fake_where_others_are() -> None:
    real = torch.ones(2)
    assert as_fake([real, 3]) == [real, 3]
    with FakeTensorMode():
        fake = torch.ones(2)
    found = as_fake([real, fake, 3])
    assert isinstance(found[0], FakeTensor)
    assert found[1:] == [fake, 3]


def test_a_function_runs_on_fakes_though_it_holds_real_tensors() -> None:
    with FakeTensorMode():
        fake = torch.ones(3, 2)
    held = torch.ones(2)
    assert run_fake(lambda x: x + held, [fake]).shape == (3, 2)
    assert torch.equal(run_fake(lambda x: x + held, [held]), held + 1)


def test_strides_are_taken_over() -> None:
    with FakeTensorMode():
        plain = torch.ones(3, 2, requires_grad=True) + 0
        turned = torch.ones(2, 3).t()
    (found,) = with_strides_of([plain], [turned])
    assert found.stride() == (1, 3)
    assert found.requires_grad
    assert with_strides_of([plain], [plain])[0] is plain


def test_a_copy_has_a_graph_of_its_own_and_the_same_attributes() -> None:
    gm = symbolic_trace(nn.Linear(2, 2))
    copied = copy_module(gm)
    next(iter(copied.graph.nodes)).meta["mark"] = 1
    assert "mark" not in next(iter(gm.graph.nodes)).meta
    assert copied.weight is gm.weight
    assert torch.equal(copied(torch.ones(1, 2)), gm(torch.ones(1, 2)))


def test_marks_of_inputs_go_with_them() -> None:
    whole, piece = symbolic_trace(lambda x, y: x + y), symbolic_trace(lambda y: y.sin())
    for node in whole.graph.find_nodes(op="placeholder"):
        node._dynamo_source = f"source of {node.name}"
    whole.meta["note"] = 1
    whole._param_name_to_source = {"a": 1}
    inherit_marks(whole, piece)
    (node,) = piece.graph.find_nodes(op="placeholder")
    assert node._dynamo_source == "source of y"
    assert piece.meta == {"note": 1}
    assert piece._param_name_to_source == {"a": 1}


def test_a_piece_is_compiled_and_its_results_are_known() -> None:
    seen: list[Any] = []

    def backend(gm: Any, examples: Any, **options: Any) -> Any:
        seen.append(options)
        return gm.forward

    with FakeTensorMode():
        fake = torch.ones(3, 2)
    run, (result,) = compile_forward_piece(symbolic_trace(lambda x: (x.t(),)), [fake], backend, {"mode": 1})
    assert isinstance(result, FakeTensor)
    assert result.stride() == (1, 2)
    assert run(torch.ones(1, 2))[0].shape == (2, 1)
    assert seen == [{"mode": 1}]


def test_messages_to_dynamo_are_no_failures() -> None:
    assert must_reach_dynamo(SkipFrame("enough"))
    assert not must_reach_dynamo(ValueError("no"))


class Ragged(nn.Module):
    """Its layers run on a tensor that wraps the rows of all its sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = torch.nested.nested_tensor_from_jagged(self.layers[0](rows), torch.tensor([0, 2, 5]))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x.values()


class Printing(nn.Module):
    """Prints between its layers, by an operator whose calls are kept in their order by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            torch._higher_order_ops.print("layer {}", number)
        return x


@pytest.mark.parametrize("kind", [Ragged, Printing])
def test_wrappers_and_tokens_cross_the_cuts_of_a_graph(
    kind: type[nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    """AOTAutograd's first call, on fakes, returned what is wrapped, or a token, in the place of a result: the
    next piece was compiled for that, and the frame ended in BackendCompilerFailed.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    optimizer = DDPOptimizer(1, aot_eager, first_bucket_cap=1)
    run = torch.compile(copy.deepcopy(model), backend=optimizer.compile_fn, fullgraph=True)
    rows = torch.randn(5, 4)
    shown = []
    for module in (model, run):
        for _ in range(2):
            module(rows).square().mean().backward()
        shown.append(capfd.readouterr().out)
    assert optimizer.compiled == 3
    assert shown[0] == shown[1]
    for parameter, other in zip(run.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
