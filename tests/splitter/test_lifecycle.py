"""What people do with a module after it was cut."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.splitter.graphs import assignable, by_name, in_runs
from tests.splitter.models import Net, exported, traced
from torch import nn
from torch.fx import GraphModule, Interpreter

import partita
from partita.splitter import Split, split_module

CAPTURES = {"traced": traced, "exported": exported}


@pytest.fixture(params=CAPTURES)
def gm(request: pytest.FixtureRequest) -> GraphModule:
    torch.manual_seed(0)
    return CAPTURES[request.param](Net(), (torch.randn(3, 4),))


@pytest.fixture(params=["fresh", "run"])
def cut(request: pytest.FixtureRequest, gm: GraphModule) -> Split:
    split = partita.split(gm, in_runs(gm, 3))
    if request.param == "run":
        state = {name: value.clone() for name, value in split.module.state_dict().items()}
        split.module(torch.randn(3, 4))
        split.module.load_state_dict(state)
    return split


@pytest.fixture
def args() -> tuple[torch.Tensor]:
    return (torch.randn(3, 4, requires_grad=True),)


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved, copy.copy])
def test_a_duplicate_does_the_same(
    duplicate: Callable[[nn.Module], nn.Module], cut: Split, gm: GraphModule, args: tuple[torch.Tensor]
) -> None:
    twin = duplicate(cut.module)
    assert twin.state_dict().keys() == cut.module.state_dict().keys()
    assert dict(twin.named_buffers()).keys() == dict(cut.module.named_buffers()).keys()
    assert [module.training for module in twin.modules()] == [
        module.training for module in cut.module.modules()
    ]
    partita.verify(twin, gm, args).check()
    partita.verify(duplicate(twin), gm, args).check()


def test_a_deep_copy_shares_nothing(cut: Split, args: tuple[torch.Tensor]) -> None:
    twin = copy.deepcopy(cut.module)
    kept = {id(tensor) for tensor in (*cut.module.parameters(), *cut.module.buffers())}
    assert not kept & {id(tensor) for tensor in (*twin.parameters(), *twin.buffers())}
    assert twin.graph.owning_module is twin
    assert cut.module.graph.owning_module is cut.module


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_duplicate_keeps_pieces_that_only_write(
    duplicate: Callable[[nn.Module], nn.Module], cut: Split, gm: GraphModule
) -> None:
    twin = duplicate(cut.module)
    before = len(twin.graph.nodes)
    twin.graph.eliminate_dead_code()
    twin.recompile()
    calls = [node for node in twin.graph.nodes if node.op == "call_module"]
    assert len(calls) == len(cut.pieces)
    assert len(twin.graph.nodes) <= before
    partita.verify(twin, gm, (torch.randn(3, 4),)).check()


def test_dead_code_elimination_in_the_pieces_changes_nothing(
    cut: Split, gm: GraphModule, args: tuple[torch.Tensor]
) -> None:
    for piece in cut.pieces:
        piece.module.graph.eliminate_dead_code()
        piece.module.recompile()
        piece.module.graph.lint()
    cut.module.graph.lint()
    partita.verify(cut, gm, args).check()


def test_the_state_dict_goes_out_and_in(cut: Split, args: tuple[torch.Tensor]) -> None:
    state = {
        name: torch.randn_like(value) if value.is_floating_point() else value
        for name, value in cut.module.state_dict().items()
    }
    twin = copy.deepcopy(cut.module)
    # a parameter that several pieces hold stands there under several names
    for name, value in cut.module.state_dict(keep_vars=True).items():
        for other, same in cut.module.state_dict(keep_vars=True).items():
            if same is value:
                state[other] = state[name]
    cut.module.load_state_dict(state)
    twin.load_state_dict(state)
    partita.verify(twin, cut.module, args).check()


def test_each_piece_holds_the_original_names(gm: GraphModule) -> None:
    cut = partita.split(gm, in_runs(gm, 3))
    originals = dict(
        (*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False))
    )
    names = set()
    for piece in cut.pieces:
        for name, tensor in (
            *piece.module.named_parameters(remove_duplicate=False),
            *piece.module.named_buffers(remove_duplicate=False),
        ):
            assert tensor is originals[name]
            names.add(name)
        persistent = set(piece.module.state_dict())
        assert persistent <= set(gm.state_dict())
        assert all(
            name not in gm.state_dict() for name, _ in piece.module.named_buffers() if name not in persistent
        )
    assert set(gm.state_dict()) - names <= {"tied", "head.weight"}


def test_moving_and_converting_reaches_every_piece(cut: Split) -> None:
    cut.module.to(torch.float64)
    assert {tensor.dtype for tensor in cut.module.parameters()} == {torch.float64}
    assert cut.module.to("cpu") is cut.module
    assert {tensor.device.type for tensor in copy.deepcopy(cut.module).to("meta").parameters()} == {"meta"}
    assert {tensor.device.type for tensor in cut.module.parameters()} == {"cpu"}


def test_train_and_eval_reach_every_piece(args: tuple[torch.Tensor]) -> None:
    gm = traced(Net(), args)
    cut = partita.split(gm, in_runs(gm, 3))
    for mode in (False, True):
        cut.module.train(mode)
        gm.train(mode)
        assert all(module.training is mode for module in cut.module.modules())
        partita.verify(cut, gm, args).check()


def test_an_interpreter_runs_it(cut: Split, gm: GraphModule) -> None:
    x = torch.randn(3, 4)
    interpreter = Interpreter(copy.deepcopy(cut.module))
    assert torch.equal(interpreter.run(x), gm(x))


def test_it_can_be_printed_and_its_code_read(cut: Split) -> None:
    text = cut.module.print_readable(print_output=False)
    for piece in cut.pieces:
        assert f"class {piece.name}(torch.nn.Module)" in text
        assert "def forward(self" in piece.module.code
        assert piece.name in str(cut.module)


def test_it_can_be_traced_again(args: tuple[torch.Tensor]) -> None:
    gm = traced(Net(), args)
    cut = partita.split(gm, in_runs(gm, 3))
    again = torch.fx.symbolic_trace(cut.module)
    partita.verify(again, gm, args).check()


def test_it_can_be_cut_again(cut: Split, gm: GraphModule, args: tuple[torch.Tensor]) -> None:
    names = [node.name for node in assignable(cut.module)]
    twice = partita.split(cut.module, {name: number // 2 for number, name in enumerate(names)})
    partita.verify(twice, gm, args).check()
    partita.verify(split_module(cut.module, None, lambda node: names.index(node.name) // 2), gm, args).check()
    inner = max(cut.pieces, key=lambda piece: len(piece.node_names))
    partita.split(inner.module, in_runs(inner.module, 1))


@pytest.mark.parametrize("when", ["fresh", "run"])
@pytest.mark.parametrize("drop_in", [False, True])
def test_it_can_be_compiled_whole(when: str, drop_in: bool) -> None:
    x = torch.randn(3, 4)
    gm = traced(Net().eval(), (x,))
    keys = in_runs(gm, 3)
    module = split_module(gm, None, by_name(keys)) if drop_in else partita.split(gm, keys).module
    if when == "run":
        module(x)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), gm(x))
    assert torch.equal(compiled(x), module(x))
    torch._dynamo.reset()


def test_a_piece_can_be_compiled_in_place() -> None:
    x = torch.randn(3, 4)
    gm = traced(Net().eval(), (x,))
    cut = partita.split(gm, in_runs(gm, 3))
    torch._dynamo.reset()
    cut.pieces[1].module.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(cut.module(x), gm(x))
        assert torch.equal(cut.module(x), gm(x))
    torch._dynamo.reset()


def test_it_can_be_compiled_down_to_aten() -> None:
    x = torch.randn(4)
    gm = torch.fx.symbolic_trace(lambda x: torch.cos(torch.sin(x)) + x)
    cut = partita.split(gm, in_runs(gm, 1))
    torch._dynamo.reset()
    compiled = torch.compile(cut.module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), gm(x))
    torch._dynamo.reset()


def test_it_can_be_exported(args: tuple[torch.Tensor]) -> None:
    gm = traced(Net().eval(), args)
    cut = partita.split(gm, in_runs(gm, 3))
    program = torch.export.export(cut.module, (torch.randn(3, 4),))
    partita.verify(program.module(), gm, args, backward=False).check()


def test_forward_hooks_run_once(args: tuple[torch.Tensor]) -> None:
    gm = traced(Net(), args)
    cut = partita.split(gm, in_runs(gm, 3))
    calls: list[str] = []
    cut.module.register_forward_hook(lambda *_: calls.append("whole"))
    cut.pieces[0].module.register_forward_hook(lambda *_: calls.append("piece"))
    cut.module(*args)
    assert calls == ["piece", "whole"]


def test_an_error_shows_the_node_that_failed() -> None:
    import traceback

    gm = traced(Net(), (torch.randn(3, 4),))
    cut = partita.split(gm, in_runs(gm, 3))
    with pytest.raises(RuntimeError) as caught:
        cut.module(torch.randn(3, 5))
    text = "".join(traceback.format_exception(caught.value))
    assert "blocks_0_linear: call_module[blocks.0.linear](x,)" in text
