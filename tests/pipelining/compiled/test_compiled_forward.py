"""The compiled forward of one stage: what is refused runs as it is, and what is equal is compiled once."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from tests.pipelining.models import NORMED, PLAIN, SKIP, TRANSFORMER, WIDTH
from tests.pipelining.running import cut
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch.nn.modules.module import register_module_forward_hook
from torch.testing._internal.two_tensor import TwoTensor

from partita import verify
from partita.errors import NotCompiled
from partita.pipelining import PipelineStage, SplitPoint, pipeline
from partita.pipelining.compiled.artifacts import artifacts_for
from partita.pipelining.compiled.compiled_forward import CompiledForward
from partita.pipelining.interface.compile_options import CompileOptions
from partita.pipelining.stages.backward.split_backward import input_pass
from partita.runtime import InProcessWorld, PlainRunner

EAGER = CompileOptions("aot_eager")


def _compiled(module: nn.Module, options: CompileOptions = EAGER) -> CompiledForward:
    forward = CompiledForward(module, options, "stage 0")
    vars(module)["forward"] = forward
    return forward


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if x.mean() > 0:
            h = h.tanh()
        return self.b(h)


@pytest.mark.parametrize("what", ["a branch on data", "an input used twice that goes on"])
def test_a_stage_is_called_by_name(what: str) -> None:
    """What is read before the graph runs, and inputs that are handed over for each use, went by position."""
    model, ends = (Branches(), ["a"]) if what == "a branch on data" else (SKIP.model(), ["a", "c"])
    spec = dict.fromkeys(ends, SplitPoint.END)
    stage = pipeline(model, (torch.ones(2, WIDTH),), split_spec=spec, compile="aot_eager").build_stage(1)
    values = {name: torch.randn(2, WIDTH) for name in stage.border.inputs}
    first, *rest = values
    for _ in range(2):
        expected = stage.module(*values.values())
        for call in (values, {name: values[name] for name in [*rest, first]}):
            assert all(map(torch.equal, stage.module(**call), expected))
        with pytest.raises(TypeError, match=f"missing.*{first!r}"):
            stage.module(**{name: values[name] for name in rest})
    with pytest.raises(TypeError, match="missing"):
        stage.module()


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        torch._dynamo.graph_break()
        return y.relu()


@pytest.mark.parametrize("how", ["patched", "torch.compile"])
def test_a_forward_that_was_set_on_the_module_itself_is_what_is_compiled(how: str) -> None:
    """As libraries patch modules. The class's was taken: another number, or no number."""
    layer = nn.Linear(WIDTH, WIDTH)
    module: nn.Module = layer
    if how == "patched":
        layer.forward = MethodType(lambda self, x: type(self).forward(self, x) * 3, layer)  # type: ignore[method-assign]
    else:
        module = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
    x = torch.ones(2, WIDTH)
    expected = module(x)
    for _ in range(2):  # compiled anew
        forward = _compiled(module)
        assert torch.equal(module(x), expected)
        assert not forward.refused
    assert torch.equal(copy.deepcopy(module)(x), expected)


def test_what_can_not_be_compiled_runs_as_it_is_with_one_warning_that_says_why_and_where() -> None:
    module = Breaks()
    expected = module(torch.ones(2, WIDTH))
    forward = _compiled(module)
    with pytest.warns(
        NotCompiled, match=r"stage 0 runs uncompiled.*graph_break.*test_compiled_forward\.py:\d+"
    ):
        assert torch.equal(module(torch.ones(2, WIDTH)), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(module(torch.ones(2, WIDTH)), expected)
    assert "graph_break" in forward.refused


class Recurrent(nn.Module):
    """Traced, a GRU of batches first rounds otherwise, and draws other numbers between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.first(x).relu())[0]  # type: ignore[no-any-return]


def test_a_stage_with_a_recurrent_layer_runs_as_it_is_and_the_others_are_compiled() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(2, 3, WIDTH)
    pipe = pipeline(model, (x,), split_spec={"first": SplitPoint.END}, compile="aot_eager")
    with pytest.warns(NotCompiled, match=r"stage 1 runs uncompiled.*aten\.gru\.input") as warned:
        verify(pipe, model, (x,)).check()
    assert len(warned) == 1


@pytest.mark.parametrize("loss", [nn.MultiLabelMarginLoss(), nn.MultiMarginLoss()], ids=["labels", "classes"])
def test_a_stage_with_a_margin_loss_runs_as_it_is(loss: nn.Module) -> None:
    """A trace computes another number of several labels: ``torch.compile`` gives 2.05 for the example that
    torch documents with 0.85.
    """
    scores = torch.tensor([[0.1, 0.2, 0.4, 0.8]])
    target = torch.tensor([[3, 0, -1, 1]]) if isinstance(loss, nn.MultiLabelMarginLoss) else torch.tensor([3])
    expected = loss(scores, target)
    _compiled(loss)
    with pytest.warns(NotCompiled, match="stage 0 runs uncompiled.*it has a margin loss.*margin_loss"):
        assert torch.equal(loss(scores, target), expected)


class Wrapped(nn.Module):
    """A frozen weight of two tensors, as a quantised one is of integers and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(TwoTensor(torch.randn(WIDTH), torch.randn(WIDTH)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).relu() * self.weight.a  # type: ignore[no-any-return, operator]


def test_a_stage_with_a_weight_that_wraps_several_tensors_runs_as_it_is() -> None:
    """Its backward pass ended in an ``IndexError``."""
    module, x = Wrapped(), torch.randn(2, WIDTH)
    expected = module(x)
    _compiled(module)
    with pytest.warns(NotCompiled, match="stage 0 runs uncompiled.*'weight' is a TwoTensor, which wraps"):
        result = module(x)
    assert torch.equal(result, expected)
    result.sum().backward()


def test_an_error_of_the_stage_itself_is_the_users_and_no_reason_to_stay_uncompiled() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    forward = _compiled(module)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(2, 3))
    module(torch.ones(2, WIDTH))
    assert not forward.refused


def _log_backward(module: nn.Module, log: list[int]) -> None:
    module.register_full_backward_hook(lambda *_: log.append(1))


def _log_forward(module: nn.Module, log: list[int]) -> None:
    module.register_forward_hook(lambda *_: log.append(1))


@pytest.mark.parametrize("register", [_log_backward, _log_forward])
def test_hooks_of_submodules_fire_as_ever_since_the_step_runs_uncompiled(
    register: Callable[[nn.Module, list[int]], None],
) -> None:
    module, log = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), list[int]()
    forward = _compiled(module)
    module(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    register(module[0], log)
    with pytest.warns(NotCompiled, match="its submodule '0' has a hook"):
        forward.begin()
    module(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    assert log == [1]


def test_hooks_of_the_stage_itself_and_of_parameters_fire() -> None:
    module, log = nn.Sequential(nn.Linear(WIDTH, WIDTH)), list[int]()
    forward = _compiled(module)
    _log_backward(module, log)
    module[0].weight.register_hook(lambda _: log.append(2))
    forward.begin()
    module(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    assert sorted(log) == [1, 2]
    assert not forward.hooked


def _equal_blocks() -> Any:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4)]
    spec = {str(number): SplitPoint.END for number in range(3)}
    return pipeline(nn.Sequential(*blocks), (torch.randn(2, WIDTH),), split_spec=spec)


def test_equal_stages_are_one_function_though_each_draws_its_own_numbers() -> None:
    pipe = _equal_blocks()
    forwards = []
    for index in range(4):
        module = pipe.get_stage_module(index)
        forwards.append(_compiled(module, CompileOptions("aot_eager", dynamic=False)))
        module(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    artifacts = forwards[0]._artifacts
    assert all(forward._artifacts is artifacts for forward in forwards)
    assert len(artifacts.functions) == 1
    assert artifacts.compiled == 2  # the forward graph, and B
    assert [entry.first_site for forward in forwards for entry in forward._entries.values()] == [0, 1, 2, 3]


def test_equal_modules_of_the_users_share_their_compiled_graphs() -> None:
    compiled: list[int] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled.append(1)
        return gm.forward

    options = CompileOptions(backend)
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    forwards = [_compiled(module, options) for module in modules]
    for module in modules:
        module(torch.ones(2, WIDTH)).sum().backward()
    assert len(compiled) == forwards[0]._artifacts.compiled == 2


def test_what_was_compiled_with_other_settings_of_torch_serves_nobody() -> None:
    """A stage compiled before ``use_deterministic_algorithms(True)`` kept its kernels, and a pipeline
    that was cut after a change of Inductor's configuration ran what an older one had compiled.
    """
    module = nn.Linear(WIDTH, WIDTH)
    forward = _compiled(module, CompileOptions(lambda gm, _: gm.forward))
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            module(torch.ones(2, WIDTH)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert forward._artifacts.compiled == 4
    assert artifacts_for(EAGER) is (artifacts := artifacts_for(EAGER))
    for change in (functorch.patch(activation_memory_budget=0.5), inductor.patch(epilogue_fusion=False)):
        with change:
            assert artifacts_for(EAGER) is not artifacts


def test_a_stage_divides_its_first_backward_pass_too() -> None:
    """Hooks that torch registers while it traces counted as the stage's: B was compiled too, for one pass."""
    compiled: list[int] = []

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        compiled.append(1)
        return gm.forward

    (comm,) = InProcessWorld(1).run(lambda comm: comm)
    stage = _equal_blocks().build_stage(1, comm=comm)
    stage.compile(backend)
    (name,), (output,) = stage.border.inputs, stage.border.outputs
    stage.forward(0, {name: torch.ones(2, WIDTH)}, train=True)
    stage.backward_input(0, {output: torch.ones(2, WIDTH)})
    stage.backward_weight(0)
    assert len(compiled) == 3  # F, I and W


def test_weights_have_gradients_under_compiled_autograd_too() -> None:
    """It never ran the nodes of compiled stages, so that their W was empty, and gradients were lost without a
    word.
    """
    (comm,) = InProcessWorld(1).run(lambda comm: comm)
    stage = _equal_blocks().build_stage(1, comm=comm)
    stage.compile("aot_eager")
    (name,), (output,) = stage.border.inputs, stage.border.outputs
    with compiled_autograd._enable(lambda gm: gm):
        stage.forward(0, {name: torch.ones(2, WIDTH, requires_grad=True)}, train=True)
        stage.backward_input(0, {output: torch.ones(2, WIDTH)})
        stage.backward_weight(0)
    assert all(parameter.grad is not None for parameter in stage.module.parameters())


def test_a_piece_runner_is_given_the_graphs_of_each_stage() -> None:
    runner = PlainRunner()
    pipe = _equal_blocks()
    for index in range(2):
        module = pipe.get_stage_module(index)
        _compiled(module, CompileOptions(runner))
        module(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    assert len(runner.graphs) == 4


def test_more_sizes_than_torch_compiles_one_function_for_run_as_they_are() -> None:
    """Torch's own error about fullgraph came out of the step."""
    module = cut(PLAIN, 1).get_stage_module(0)
    forward = _compiled(module, CompileOptions("aot_eager", dynamic=False))
    with torch._dynamo.config.patch(recompile_limit=1):
        module(torch.ones(2, WIDTH))
        with pytest.warns(NotCompiled, match="raise the limit, or compile sizes as symbols"):
            module(torch.ones(3, WIDTH))
    assert forward.refused


def test_hooks_of_all_modules_are_not_called_for_modules_that_a_compiler_has_made() -> None:
    module, hooked = cut(PLAIN, 1).get_stage_module(0), list[nn.Module]()
    _compiled(module)
    with register_module_forward_hook(lambda module, *_: hooked.append(module)):
        module(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    assert hooked == [module]


def test_a_copy_and_a_pickle_compile_anew_and_do_the_same() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    _compiled(module)
    expected = module(torch.ones(2, WIDTH))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        forward = vars(other)["forward"]
        assert forward._module is other
        assert torch.equal(other(torch.ones(2, WIDTH)), expected)
    stage = cut(PLAIN, 2).build_stage(0)
    stage.compile("aot_eager")
    again = pickle.loads(pickle.dumps(stage.module))
    assert torch.equal(again(torch.ones(2, WIDTH)), stage.module(torch.ones(2, WIDTH)))


def test_both_modes_have_their_own_graph() -> None:
    pipe = cut(NORMED, 1)
    module, plain = pipe.get_stage_module(0), cut(NORMED, 1).get_stage_module(0)
    _compiled(module)
    x = torch.randn(4, WIDTH)
    for mode in (True, False, True):
        module.train(mode), plain.train(mode)
        torch.manual_seed(1)
        actual = module(x)
        torch.manual_seed(1)
        assert torch.equal(actual, plain(x))


def test_a_compiled_stage_keeps_its_state_dict() -> None:
    stage = cut(TRANSFORMER, 2).build_stage(1)
    before = list(stage.module.state_dict())
    stage.compile("aot_eager")
    assert list(stage.module.state_dict()) == before


def test_a_stage_that_runs_the_models_own_code_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(
        model,
        (torch.randn(2, WIDTH),),
        split_spec={"0": SplitPoint.END},
        frontend="modules",
        compile="aot_eager",
    )
    with pytest.warns(NotCompiled, match=r'stage 1 runs uncompiled.*frontend="modules"'):
        pipe.build_stage(1, comm=InProcessWorld(1).run(lambda comm: comm)[0])
    with pytest.warns(
        NotCompiled
    ) as warned:  # so does the call, or `verify` would say "equal" of what it is not
        verify(pipe, model, (torch.randn(2, WIDTH),)).check()
    assert [str(one.message).partition(" runs")[0] for one in warned] == ["stage 0", "stage 1"]


def test_a_stage_of_the_users_own_is_compiled() -> None:
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu")
    stage.compile("aot_eager")
    assert isinstance(vars(stage.module)["forward"], CompiledForward)


@pytest.mark.parametrize("halves", [False, True], ids=["B", "I and W"])
def test_a_backward_graph_that_the_compiler_fails_at_runs_as_it_is(halves: bool) -> None:
    """What a backend raised at a backward graph came out of the step, and that of a forward graph warned."""

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        names = [node.name for node in gm.graph.nodes]
        if any(name.startswith(("tangents", "mm", "sum")) for name in names):
            gm.graph.output_node().args = ((),)  # it has begun to change the graph
            gm.recompile()
            raise RuntimeError("no backward pass")
        return gm.forward

    module = nn.Linear(WIDTH, WIDTH)
    x, gradients = torch.ones(2, WIDTH, requires_grad=True), []
    for compiles in (False, True):
        module.zero_grad()
        if compiles:
            _compiled(module, CompileOptions(backend))
        y = module(x)
        with (
            pytest.warns(NotCompiled, match="runs uncompiled.*no backward pass")
            if compiles
            else nullcontext()
        ):
            if halves:
                half = input_pass([y], [torch.ones_like(y)], [x])
                half.weights.run()
                (of_x,) = half.gradients
            else:
                (of_x,) = torch.autograd.grad(y.sum(), [x], retain_graph=True)
                y.sum().backward(inputs=list(module.parameters()))
        gradients.append([of_x, *(parameter.grad for parameter in module.parameters())])
    for uncompiled, compiled in zip(*gradients, strict=True):
        assert torch.equal(uncompiled, compiled)
