from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.pipelining.models import CASES, MASK, NORMED, OUTPUTS, PLAIN, TRANSFORMER, WIDTH, Called, Case
from tests.pipelining.running import assert_equal, cut
from torch import Tensor, nn
from torch.fx import GraphModule

from partita.errors import (
    AssignmentError,
    CaptureError,
    InfeasiblePlan,
    PartitaError,
    PlanError,
    SignatureMismatch,
)
from partita.pipelining import Schedule1F1B, SplitPoint, measure_units, pipe_split, pipeline
from partita.planning import plan_stages
from partita.runtime import Comm, InProcessWorld


def _example(case: Case) -> tuple[nn.Module, tuple[object, ...]]:
    return case.model(), case.data(2)[0]


def test_the_users_model_is_not_changed_and_can_be_cut_again() -> None:
    model, args = _example(NORMED)
    model.c.eval()
    before, flags = copy.deepcopy(model.state_dict()), [child.training for child in model.modules()]
    first = pipeline(model, args, split_spec=NORMED.split_spec(3))
    second = pipeline(model, args, stages=2)
    assert_equal(model.state_dict(), before)
    assert [child.training for child in model.modules()] == flags
    assert type(model) is type(NORMED.make())
    assert (first.num_stages, second.num_stages) == (3, 2)
    assert first.get_stage_module(0).a.weight is model.a.weight


class TiedByALambda(nn.Module):
    """As x-transformers ties its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mid, self.last = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.to_logits = lambda h: h @ self.tokens.weight.t()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.to_logits(self.last(self.mid(self.tokens(tokens)).relu()))


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_function_that_holds_the_model_is_that_of_the_copy_in_a_copy(frontend: Any) -> None:
    """A copy's ran with the weights of the model itself, in whose gradients the proof left its own; stages
    cut by modules used the weights of the model, and not theirs.
    """
    model, tokens = TiedByALambda(), torch.randint(7, (2, 3))
    uncut = TiedByALambda()
    uncut.load_state_dict(model.state_dict())
    pipe = pipeline(model, (tokens,), split_spec={"last": SplitPoint.BEGINNING}, frontend=frontend)
    assert pipe.proof.holds
    assert all(parameter.grad is None for parameter in model.parameters())
    for each in (uncut, pipe):
        each(tokens).square().sum().backward()
    assert_equal(*({name: it.grad for name, it in each.named_parameters()} for each in (model, uncut)))


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_function_that_holds_the_model_uses_the_weights_of_its_stage(frontend: Any) -> None:
    """By modules it used those of the model, in which no stage's gradients arrive."""
    model, tokens, target = TiedByALambda(), torch.randint(7, (4, 3)), torch.randint(7, (4, 3))
    uncut = TiedByALambda()
    uncut.load_state_dict(model.state_dict())
    pipe = pipeline(model, (tokens[:2],), split_spec={"last": SplitPoint.BEGINNING}, frontend=frontend)

    def loss_fn(logits: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def rank(comm: Comm) -> dict[str, Tensor | None]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        Schedule1F1B(stage, 2, loss_fn).step(tokens, target=target)
        return {name: it.grad for name, it in stage.module.named_parameters()}

    first, last = InProcessWorld(2).run(rank)
    for sample, wanted in zip(tokens.chunk(2), target.chunk(2), strict=True):
        (loss_fn(uncut(sample), wanted) / 2).backward()
    assert_equal(last | first, {name: it.grad for name, it in uncut.named_parameters()})


@pytest.mark.parametrize("case", [*CASES], ids=lambda case: case.name)
def test_stages_together_have_the_models_own_names(case: Case) -> None:
    pipe = cut(case, len(case.after) + 1)
    states = [pipe.get_stage_module(index).state_dict() for index in range(pipe.num_stages)]
    assert set().union(*states) == case.model().state_dict().keys()
    case.model().load_state_dict({name: value for state in states for name, value in state.items()})
    buffers = [dict(pipe.get_stage_module(index).named_buffers()) for index in range(pipe.num_stages)]
    assert set().union(*buffers) == dict(case.model().named_buffers()).keys()


def test_what_no_stage_uses_goes_where_its_relatives_are() -> None:
    pipe = cut(NORMED, 4)
    homes = [index for index in range(4) if "unused.weight" in pipe.get_stage_module(index).state_dict()]
    assert len(homes) == 1


@pytest.mark.parametrize("case", [PLAIN, MASK, OUTPUTS, NORMED, TRANSFORMER], ids=lambda case: case.name)
def test_a_local_call_is_the_models_own_in_signature_structure_autograd_and_random_numbers(
    case: Case,
) -> None:
    model = case.model()
    pipe = cut(case, 3)
    args, kwargs, target = case.data(2)
    for mode in (True, False):
        results = []
        for runner in (model.train(mode), pipe.train(mode)):
            torch.manual_seed(3)
            output = runner(*args, **kwargs)
            case.loss(output, target).backward()
            results.append((output, torch.rand(1)))
        assert_equal(results[1], results[0])
    gradients = {
        name: value.grad
        for index in range(3)
        for name, value in pipe.get_stage_module(index).named_parameters(remove_duplicate=False)
    }
    expected = {name: value.grad for name, value in model.named_parameters(remove_duplicate=False)}
    assert_equal(gradients, {name: expected[name] for name in gradients})


def test_arguments_are_bound_like_the_models() -> None:
    model, pipe = MASK.model(), cut(MASK, 2)
    (x, scale), kwargs, _ = MASK.data(2)
    expected = model(x, scale, **kwargs)
    assert torch.equal(pipe(x, scale=scale, **kwargs), expected)
    assert torch.equal(pipe(mask=kwargs["mask"], x=x, scale=scale), expected)
    with pytest.raises(
        ValueError, match=r"arguments missing: scale\. The model was captured with x, scale, mask"
    ):
        pipe(x, **kwargs)
    with pytest.raises(ValueError, match="not there at capture: bias"):
        pipe(x, scale, bias=x, **kwargs)
    with pytest.raises(ValueError, match="given twice: x"):
        pipe(x, scale, x=x, **kwargs)
    with pytest.raises(ValueError, match="takes 2 positional arguments, got 5"):
        pipe(x, scale, x, x, x, **kwargs)


def test_a_local_call_with_another_shape_or_number_is_refused_not_computed_wrongly() -> None:
    pipe = cut(MASK, 2)
    (x, scale), kwargs, _ = MASK.data(2)
    with pytest.raises(
        SignatureMismatch, match=r"the call brings float32\[2, 7\] for x: float32\[batch, 8\]"
    ):
        pipe(x[:, :7], scale, **kwargs)
    with pytest.raises(SignatureMismatch, match=r"the call brings 3.5 for scale = 2.5"):
        pipe(x, 3.5, **kwargs)


def test_no_way_to_find_the_cuts_or_two_are_a_value_error() -> None:
    model, args = _example(PLAIN)
    with pytest.raises(ValueError, match="does not know where to cut: give stages=N"):
        pipeline(model, args)
    with pytest.raises(ValueError, match="pipeline got split_spec and split_policy: give one"):
        pipeline(model, args, None, {"a": SplitPoint.END}, lambda gm: gm)
    with pytest.raises(ValueError, match="pipeline got stages and plan"):
        pipeline(model, args, stages=2, plan=plan_stages(measure_units(model, args), 2))
    with pytest.raises(ValueError, match="returned a graph without pipe_split marks"):
        pipeline(model, args, split_policy=lambda gm: gm)


def test_an_unknown_split_point_is_an_attribute_error_that_names_it() -> None:
    model, args = _example(TRANSFORMER)
    with pytest.raises(
        AttributeError, match=r"'blocks.0.nothing': _Block has no submodule 'nothing'; it has norm"
    ):
        pipeline(model, args, split_spec={"blocks.0.nothing": SplitPoint.END})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_spec": {"c": SplitPoint.END}}, "'c': NeverCalled has no submodule 'c'; it has a, b"),
        ({"split_spec": {"a": "end"}}, "a stage can't start at 'end': give SplitPoint.BEGINNING or"),
        ({"split_spec": ["a"]}, "split_spec is ['a']: give a dict from submodule names to SplitPoint"),
        ({"stages": 2, "multi_use_param_spec": {"c": 1}}, "names 'c', but the model has no such parameter"),
        ({"stages": 2, "recompute": [1.5]}, "recompute has 1.5: give True, or a list of stages"),
        ({"stages": 2, "split_policy": print}, "pipeline got split_policy and stages: give one of them"),
    ],
)
def test_what_needs_no_graph_is_refused_before_the_model_is_captured(
    options: dict[str, Any], message: str
) -> None:
    class NeverCalled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("captured")

    with pytest.raises(PartitaError, match=re.escape(message)):
        pipeline(NeverCalled(), (torch.ones(1, 2),), **options)


def test_a_split_point_at_a_module_that_is_never_called_is_refused() -> None:
    model, args = _example(NORMED)
    with pytest.raises(AssignmentError, match="no operation of the graph belongs to 'unused'"):
        pipeline(model, args, split_spec={"unused": SplitPoint.BEGINNING})


def test_two_split_points_on_one_place_are_one_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={"0": SplitPoint.END, "1": SplitPoint.BEGINNING})
    assert pipe.num_stages == 2


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_too_many_stages_name_the_limit_before_anything_is_measured(
    frontend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args = _example(PLAIN)
    for module in ("pipeline.cost_model", "modules.frontend.block_costs"):
        monkeypatch.setattr(f"partita.pipelining.frontends.{module}", None)
    with pytest.raises(
        InfeasiblePlan, match=r"99 stages were asked for, but .* at most .* or say where to cut by split_spec"
    ):
        pipeline(model, args, stages=99, frontend=frontend)


def test_a_plan_for_another_model_is_refused() -> None:
    model, args = _example(PLAIN)
    plan = plan_stages(measure_units(model, args), 2)
    other = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="the plan was made for another model or other shapes"):
        pipeline(other, args, plan=plan)


def test_a_plan_is_followed() -> None:
    model, args = _example(TRANSFORMER)
    plan = plan_stages(measure_units(model, args), 3)
    pipe = pipeline(model, args, plan=plan)
    assert pipe.num_stages == 3
    assert pipe.plan is plan


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        pipe_split()
        return self.b(h)


def test_pipe_split_marks_a_cut_and_does_nothing_when_the_model_runs() -> None:
    model, x = Marked(), torch.randn(2, WIDTH)
    pipe = pipeline(model, (x,))
    assert [list(pipe.get_stage_module(i).state_dict()) for i in range(2)] == [
        ["a.weight", "a.bias"],
        ["b.weight", "b.bias"],
    ]
    assert torch.equal(model(x), pipe(x))
    with pytest.raises(ValueError, match=r"the model calls pipe_split\(\) and pipeline got stages: use one"):
        pipeline(model, (x,), stages=2)


def test_a_split_policy_puts_marks_into_the_graph() -> None:
    def after_every_linear(gm: GraphModule) -> GraphModule:
        for node in [node for node in gm.graph.nodes if "linear" in node.name][:-1]:
            with gm.graph.inserting_after(node):
                gm.graph.call_function(torch.ops.partita.pipe_split.default)
        gm.recompile()
        return gm

    model, args = _example(PLAIN)
    assert pipeline(model, args, split_policy=after_every_linear).num_stages == 4


class Counter(nn.Module):
    """Reads a buffer that the end of the model counts up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x + self.calls)
        self.calls.add_(1)
        return self.b(h)


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        y.add_(1.0)
        return self.b(h) + y


class ReturnsWritten(nn.Module):
    """It returns a view that is made in one stage and written to in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        rows = h.t()
        pipe_split()
        return self.b(h.mul_(2.0)), rows


def test_writes_that_two_stages_can_see_are_refused() -> None:
    x = torch.randn(2, WIDTH)
    with pytest.raises(CaptureError, match="'add_' writes to the buffer 'calls' in stage 1, and stages"):
        pipeline(Counter(), (x,), split_spec={"a": SplitPoint.END})
    with pytest.raises(CaptureError, match="writes to the model's input 'y' in stage 1"):
        pipeline(WritesInput(), (x, x.clone()), split_spec={"a": SplitPoint.END})
    with pytest.raises(CaptureError, match="'mul_' writes to the value 'linear' in stage 1, and stages"):
        pipeline(ReturnsWritten(), (x,))


def test_a_batch_norm_called_in_two_stages_is_refused() -> None:
    class Twice(Called):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.BatchNorm1d(WIDTH)

    with pytest.raises(CaptureError, match=r"writes to the buffer 'a\.running_mean' in stage 0"):
        cut(replace(PLAIN, make=Twice, after=("b",)), 2)


def test_a_model_that_returns_a_parameter_is_refused() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(self.a(x)), self.a.weight

    with pytest.raises(CaptureError, match=r"the model returns 'a\.weight', a parameter or buffer of its"):
        pipeline(Returns(), (torch.randn(2, WIDTH),), split_spec={"a": SplitPoint.END})


def test_a_missing_stage_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="there is no stage 2: this pipe has stages 0 to 1"):
        cut(PLAIN, 2).get_stage_module(2)


def test_info_tells_parameters_what_crosses_and_what_is_tied() -> None:
    text = str(cut(TRANSFORMER, 2).info())
    assert "stage 0: " in text
    assert "to stage 1: " in text
    assert "float32[batch, 6, 8], with gradient" in text
    assert "tied: embedding.weight = head.weight in stages [0, 1]" in text


class Asserts(nn.Module):
    """Checks what it is given by a number that only the data know."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        torch._check(ids.max().item() <= 9)  # a plain assert, but pytest rewrites those of its test files
        return self.a(self.embed(ids))


def test_a_model_that_asserts_something_about_data_is_cut_with_an_open_batch_and_still_asserts() -> None:
    model = Asserts()
    pipe = pipeline(model, (torch.randint(0, 9, (2, 4)),), stages=2)
    ids = torch.randint(0, 9, (3, 4))
    assert torch.equal(pipe(ids), model(ids))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        pipe(ids + 10)
