"""Models that take another path in training than in evaluation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH, Case
from tests.pipelining.running import Record, assert_equal, assert_same, cut, keyed, piped, uncut
from torch import Tensor, nn
from torch.nn import functional

import partita
from partita.errors import CaptureError, ExecutionError, SignatureMismatch
from partita.pipelining import ScheduleGPipe, SplitPoint, UncutReference, pipeline
from partita.pipelining.interface.two_modes import TwoModes
from partita.pipelining.stages import materialise
from partita.runtime import Comm, InProcessWorld


class _Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(WIDTH, WIDTH))


class Depth(_Four):
    """Stochastic depth by scaling, noise in training only, other operations in evaluation; batch norm on the
    way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        if self.training:
            h = h + torch.randn_like(h) * 0.1
        h = self.drop(self.b(h))
        h = h + self.c(h) if not self.training else h + self.c(h) * torch.bernoulli(torch.full((1,), 0.8))
        return self.d(h * h.shape[0])


class Auxiliary(_Four):
    """Another head, and another structure of the output, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        h = self.b(self.a(x))
        extra = self.aux(h).tanh() if self.training else None
        out = self.d(self.c(h))
        return {"out": out, "aux": extra} if self.training else out


class OtherConstants(_Four):
    """A constant of one name and another value in each mode."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x))
        values = [1.0, 2.0] if self.training else [3.0, 4.0]
        h = h * torch.tensor(values * (WIDTH // 2))
        return self.d(self.c(h)) if self.training else self.d(self.c(h)).relu()


def _auxiliary_loss(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return functional.mse_loss(output, target)
    return functional.mse_loss(output["out"], target) + 0.3 * output["aux"].square().mean()


CASES = (
    Case("depth", Depth),
    Case("auxiliary head", Auxiliary, loss=_auxiliary_loss),
    Case("constants", OtherConstants),
)
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@EACH
@pytest.mark.parametrize("stages", [2, 4])
def test_training_and_evaluation_are_the_uncut_model_bit_for_bit(case: Case, stages: int) -> None:
    pipe = cut(case, stages)
    assert pipe.routes.evaluation is not None
    assert_same(piped(pipe, case), uncut(case))


@EACH
def test_a_pipe_with_two_graphs_survives_copying_and_pickling(case: Case) -> None:
    pipe, expected = cut(case, 2), uncut(case)
    assert_same(piped(pickle.loads(pickle.dumps(pipe)), case), expected)


@EACH
def test_a_local_call_is_the_model_in_both_modes(case: Case) -> None:
    model, pipe = case.model(), cut(case, 3)
    for mode in (True, False, True):
        for samples in (2, 5):
            args, kwargs, target = case.data(samples)
            results = []
            for runner in (model.train(mode), pipe.train(mode)):
                torch.manual_seed(3)
                output = runner(*args, **kwargs)
                case.loss(output, target).backward()
                results.append((output, torch.rand(1)))
            assert_equal(results[1], results[0])
    parameters = [dict(pipe.get_stage_module(index).named_parameters()) for index in range(3)]
    expected = {name: value.grad for name, value in model.named_parameters()}
    assert_equal({name: value.grad for part in parameters for name, value in part.items()}, expected)
    assert (
        set().union(*(pipe.get_stage_module(i).state_dict() for i in range(3))) == model.state_dict().keys()
    )


def test_modes_may_alternate_within_one_schedule() -> None:
    case = CASES[1]

    def run(runner: Any, modules: list[nn.Module], case: Case, record: Record) -> None:
        for step, mode in enumerate((True, False, True, False)):
            for module in modules:
                module.train(mode)
            args, kwargs, target = case.data(8 if step < 2 else 10, seed=step)
            losses: list[Tensor] = []
            record.outputs.append(runner.step(*args, target=target, losses=losses, **kwargs))
            record.outputs.append(runner.eval(*args, **kwargs))
            record.losses.append(losses)
            for module in modules:
                record.note(module)

    assert_same(piped(cut(case, 3), case, run=run), uncut(case, run=run))


def test_a_model_in_evaluation_mode_is_cut_like_one_in_training() -> None:
    case = CASES[0]
    args, _, _ = case.data(2)
    pipe = pipeline(case.model().eval(), args, split_spec=case.split_spec(2))
    assert not pipe.training
    assert "in evaluation the model takes another path:\n  stage 0 to stage 1: " in str(pipe.info())
    assert torch.equal(pipe(*args), case.model().eval()(*args))


def test_the_reference_of_such_a_model_follows_its_mode() -> None:
    case = CASES[1]
    args, _, target = case.data(8)
    whole = keyed(case)
    assert isinstance(whole, TwoModes)
    assert set(UncutReference(whole, 4, case.loss).step(*args, target=target)) == {"out", "aux"}
    assert isinstance(UncutReference(whole.eval(), 4).eval(*args), Tensor)


def test_a_part_in_another_mode_is_refused_not_computed_wrongly() -> None:
    pipe = cut(CASES[0], 2)
    pipe.get_stage_module(1).norm.eval()
    with pytest.raises(ExecutionError, match=r"norm' is in eval mode and the whole in train mode"):
        pipe(torch.randn(2, WIDTH))


def test_stages_of_one_rank_in_both_modes_are_refused() -> None:
    pipe = cut(CASES[0], 2)

    def body(comm: Comm) -> None:
        stages = [pipe.build_stage(index, comm=comm) for index in range(2)]
        stages[1].module.eval()
        ScheduleGPipe(stages, 2).eval(torch.randn(4, WIDTH))

    with pytest.raises(SignatureMismatch, match="this rank's stages are in both modes"):
        InProcessWorld(1).run(body)


class Reversed(_Four):
    """Runs its layers backwards in evaluation: no cut serves both."""

    def forward(self, x: Tensor) -> Tensor:
        order = (self.a, self.b, self.c, self.d)
        for layer in order if self.training else order[::-1]:
            x = layer(x)
        return x


class Skips(_Four):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.d(self.c(self.b(h))) if self.training else h


class Moves(_Four):
    """Counts in another stage in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            self.count.add_(1.0)
        h = self.d(self.c(self.b(h)))
        return h if self.training else h + self.count


class Teaches(_Four):
    """Moves a frozen copy of weights in training, as in BYOL and DINO. Stage 0 wrote to its copy of them, and
    in evaluation stage 1 read its own, which stayed what it was at the cut.
    """

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(self.a.weight, alpha=0.1)
        h = self.b(self.a(x))
        return self.d(self.c(h)) + self.teacher(h)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Reversed, "runs after 'linear_?[0-9]*' of stage 1: cut at the borders"),
        (
            Skips,
            "stage 1 would have nothing to compute there: cut at the borders of modules that run in both",
        ),
        (Moves, r"the buffer 'count' is used by stages \[0\] in one mode and \[1\] in the other"),
        (
            Teaches,
            r"the parameter 'teacher.weight', which forward writes to, is used by stages \[0\] in one mode",
        ),
    ],
)
def test_cuts_that_do_not_fit_the_other_mode_say_how_to_capture_one(kind: type[nn.Module], text: str) -> None:
    x = torch.randn(2, WIDTH)
    with pytest.raises(CaptureError, match=text):
        pipeline(kind(), (x,), split_spec={"b": SplitPoint.END})
    model = kind()
    expected = copy.deepcopy(model)(x)
    pipe = pipeline(model, (x,), split_spec={"b": SplitPoint.END}, modes="train")
    assert torch.equal(pipe(x), expected)
    with pytest.raises(CaptureError, match=r"captured in train mode and can't run in eval mode"):
        pipe.eval()(x)


def test_a_stage_with_two_graphs_can_be_copied_and_moved_on_its_own() -> None:
    stage = cut(CASES[1], 2).get_stage_module(1)
    other = copy.deepcopy(stage).to(torch.float64)
    assert {value.dtype for value in other.state_dict().values()} == {torch.float64}
    assert {value.dtype for value in stage.state_dict().values()} == {torch.float32}


def test_both_graphs_make_their_tensors_where_the_stage_is() -> None:
    class Makes(_Four):
        def forward(self, x: Tensor) -> Tensor:
            h = self.b(self.a(x)) + torch.arange(WIDTH, device=x.device)
            return (
                self.d(self.c(h))
                if self.training
                else self.d(self.c(h)).relu() + torch.ones(WIDTH, device=x.device)
            )

    x = torch.randn(2, WIDTH)
    pipe = pipeline(Makes(), (x,), split_spec={"a": SplitPoint.END})
    stage = pipe.build_stage(1, torch.device("cpu", 0), comm=None)
    assert stage.module(x).device.type == "cpu"
    on_meta = pipeline(Makes().to("meta"), (x.to("meta"),), split_spec={"a": SplitPoint.END})
    module = on_meta.get_stage_module(1)
    materialise(module, "cpu")
    for mode in (True, False):
        assert module.train(mode)(x).device.type == "cpu"


@pytest.mark.parametrize("ways", [{"stages": 2}, {"split_spec": {"1": SplitPoint.BEGINNING}}])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_one_mode_is_cut_whatever_mode_the_model_is_in(mode: str, ways: dict[str, Any]) -> None:
    # measuring and tracing ran the graph in the model's mode, and raised that it should be switched
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train(mode != "train")
    x = torch.randn(2, 4)
    pipe = pipeline(model, (x,), modes=mode, **ways)
    assert pipe.num_stages == 2
    assert pipe.training == model.training
    with pytest.raises(CaptureError, match=rf"call \.{mode}\(\) on it"):
        pipe(x)
    partita.verify(pipe.train(mode == "train"), model.train(mode == "train"), (x,)).check()
