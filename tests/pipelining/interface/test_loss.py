from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.pipelining.models import WIDTH
from tests.pipelining.running import assert_equal
from torch import Tensor, nn
from torch.distributed import pipelining as theirs
from torch.distributed.pipelining._backward import stage_backward
from torch.nn import functional

from partita.errors import ExecutionError
from partita.pipelining import (
    LossWrapper,
    Pipe,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    TrivialLossWrapper,
    UncutReference,
    pipeline,
)
from partita.pipelining.interface.loss import OutputLoss
from partita.runtime import Comm, InProcessWorld


def _chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Detailed(LossWrapper):
    def forward(self, x: Tensor, targets: Tensor) -> dict[str, Any]:
        prediction = self.module(x)
        return {"all": [prediction, None], "loss": self.loss_fn(prediction, targets)}


def _data(rows: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def _pipe(model: nn.Module, spec: Any, rows: int = 4) -> Pipe:
    return pipeline(model, _data(rows), split_spec={"module.1": SplitPoint.BEGINNING}, loss_spec=spec)


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("wrapper", "spec"),
    [(TrivialLossWrapper, True), (Detailed, {"all": [False, False], "loss": True})],
    ids=["trivial", "detailed"],
)
def test_a_pipe_with_its_loss_fills_the_gradients_like_the_whole_model(
    wrapper: type[LossWrapper], spec: Any
) -> None:
    model = wrapper(_chain(), functional.mse_loss)
    pipe = _pipe(copy.deepcopy(model), spec)
    assert (pipe.has_loss_and_backward, pipe.loss_spec) == (True, spec)
    for _ in range(2):  # and accumulates
        expected = model(*_data())
        (expected if isinstance(expected, Tensor) else expected["loss"]).backward()
        output = pipe(*_data())
    loss, wanted = (output, expected) if spec is True else (output["loss"], expected["loss"])
    assert torch.equal(loss, wanted)
    assert not loss.requires_grad
    gradients = [_gradients(pipe.get_stage_module(index)) for index in range(2)]
    assert_equal(gradients[0] | gradients[1], _gradients(model))
    with torch.no_grad():
        assert torch.equal(pipe(*_data()) if spec is True else pipe(*_data())["loss"], wanted)
    assert_equal(gradients[0] | gradients[1], _gradients(model))


def test_without_a_loss_spec_a_pipe_has_no_backward() -> None:
    pipe = _pipe(TrivialLossWrapper(_chain(), functional.mse_loss), None)
    assert (pipe.has_loss_and_backward, pipe.loss_spec, pipe.loss) == (False, None, None)
    assert pipe(*_data()).requires_grad


def test_a_schedule_of_a_pipe_with_its_loss_needs_no_loss_fn() -> None:
    model = Detailed(_chain(), functional.mse_loss)
    spec = {"all": (False, False), "loss": True}
    pipe = _pipe(model, spec, rows=2)
    reference = UncutReference(copy.deepcopy(pipe.whole), 2, lambda output, _: output["loss"])
    expected: list[Tensor] = []
    reference.step(*_data(), losses=expected)

    def body(comm: Comm) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        losses: list[Tensor] = []
        Schedule1F1B(stage, 2).step(*_data(), losses=losses)
        return losses, _gradients(stage.module)

    (_, first), (losses, second) = InProcessWorld(2).run(body)
    assert_equal(losses, expected)
    assert_equal(first | second, _gradients(reference.whole))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"loss": True},
            r"the loss_spec has keys \['loss'\] for the output, which has keys \['all', 'loss'\]",
        ),
        ({"all": False, "loss": False}, "marks 0 outputs as the loss: mark exactly one with True"),
        ({"all": [True, False], "loss": True}, "marks 2 outputs as the loss"),
        ({"all": [False, True], "loss": False}, r"marks \['all'\]\[1\] as the loss, which is a NoneType and"),
        ({"all": [False], "loss": True}, r"has 1 items for \['all'\], which has 2: give one for each"),
        ((False, True), "has 2 items for the output, which has a dict"),
        ({"all": {"x": True}, "loss": False}, r"has keys \['x'\] for \['all'\], which has a list"),
        (3, "has a int for the output: it is made of bools, tuples, lists and dicts"),
    ],
)
def test_a_loss_spec_that_does_not_fit_the_output_says_where(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _pipe(Detailed(_chain(), functional.mse_loss), spec)


def test_what_can_not_be_a_loss_is_refused() -> None:
    each = functional.mse_loss
    model = TrivialLossWrapper(_chain(), lambda output, target: each(output, target, reduction="none"))
    with pytest.raises(
        ExecutionError, match=r"loss_spec marks has shape \[4, 8\]: a loss is a tensor of one"
    ):
        _pipe(model, True)(*_data())
    frozen = TrivialLossWrapper(_chain(), functional.mse_loss).requires_grad_(False)
    with pytest.raises(ExecutionError, match="does not depend on any parameter that is trained: unfreeze"):
        _pipe(frozen, True)(*_data())


def test_a_wrapper_without_a_forward_says_what_to_write() -> None:
    with pytest.raises(NotImplementedError, match=r"LossWrapper has no forward: write one that runs self\."):
        LossWrapper(_chain(), functional.mse_loss)(*_data())


def test_a_loss_is_found_along_its_path() -> None:
    pick = OutputLoss([{"a": False, "b": True}], [{"a": 1.0, "b": 2.0}], float)
    assert pick([{"a": 3.0, "b": 4.0}], None) == 4.0


# --- a scalar beside the output that the loss ignores ---------------------------


class Auxiliary(nn.Module):
    """Returns a scalar beside its output, such as the balance of a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        balance = h.square().mean()
        return self.b(h), balance


def _first_only(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(output[0], target)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scalar_beside_the_output_that_the_loss_ignores_is_not_trained() -> None:
    """There, the backward pass of a stage starts from all of its outputs, and from a scalar that nobody has
    a gradient for with 1: as if it were added to the loss.
    """
    torch.manual_seed(0)
    model = Auxiliary()
    x, target = _data()
    whole = copy.deepcopy(model)
    _first_only(whole(x), target).backward()

    traced = theirs.pipeline(copy.deepcopy(model), (x,), split_spec={"b": theirs.SplitPoint.BEGINNING})
    first, second = (traced.get_stage_module(index) for index in range(2))
    crossing = first(x)
    h = crossing[0].detach().requires_grad_()
    functional.mse_loss(second(h), target).backward()
    stage_backward(crossing, (h.grad, None), (x,))
    assert (first.a.weight.grad - whole.a.weight.grad).abs().max() > 0.01

    pipe = pipeline(model, (x[:2],), split_spec={"b": SplitPoint.BEGINNING})

    def body(comm: Comm) -> dict[str, Tensor | None]:
        stage = copy.deepcopy(pipe).build_stage(comm.rank, comm=comm)
        ScheduleGPipe(stage, 2, _first_only).step(x, target=target)
        return _gradients(stage.module)

    gradients = InProcessWorld(2).run(body)
    for name, gradient in (gradients[0] | gradients[1]).items():
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad)


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_loss_under_its_name_is_found_without_being_told(frontend: Any) -> None:
    model = Detailed(_chain(), functional.mse_loss)
    whole, (x, target) = copy.deepcopy(model), _data(8)
    split = {"module.1": SplitPoint.BEGINNING}
    pipe = pipeline(model, _data(2), split_spec=split, frontend=frontend)
    assert not pipe.has_loss_and_backward  # a call of it stays the model's
    assert pipe(*_data(2))["loss"].requires_grad

    def train(comm: Comm) -> list[Tensor]:
        losses: list[Tensor] = []
        schedule = Schedule1F1B(pipe.build_stage(comm.rank, comm=comm), 4)
        schedule.step(*((x, target) if comm.rank == 0 else ()), losses=losses)
        return losses

    expected = []
    for parts in zip(x.chunk(4), target.chunk(4), strict=True):
        expected.append(whole(*parts)["loss"])
        (expected[-1] / 4).backward()
    assert_equal(InProcessWorld(2).run(train)[1], [loss.detach() for loss in expected])
    assert_equal(_gradients(model), _gradients(whole))


class Labelled(nn.Module):
    """Has a loss where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.module = _chain()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.module(x)
        loss = {} if labels is None else {"loss": functional.mse_loss(logits, labels)}
        return loss | {"logits": logits}


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_fills_losses_that_are_the_models_own(labelled: bool, mode: bool) -> None:
    """They stayed empty: there is no target."""
    model, (x, target) = Labelled(), _data(8)
    split = {"module.1": SplitPoint.BEGINNING}
    pipe = pipeline(model, _data(2), split_spec=split, frontend="modules")
    args = (x, target) if labelled else (x,)

    def evaluate(comm: Comm) -> list[Tensor]:
        losses: list[Tensor] = [torch.ones(())]
        stage = pipe.build_stage(comm.rank, comm=comm)
        stage.module.train(mode)
        Schedule1F1B(stage, 4).eval(*args, losses=losses)
        return losses

    expected: list[Tensor] = []
    UncutReference(model, 4).eval(*args, losses=expected)
    assert len(expected) == 4 * labelled
    assert_equal(InProcessWorld(2).run(evaluate), [[], expected])


class Named(nn.Module):
    """A dict with something else under the name."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.module, self.make = _chain(), make

    def forward(self, x: Tensor) -> Any:
        return {"loss": self.make(self.module(x))}


@pytest.mark.parametrize("make", [lambda y: y, lambda y: y.mean().detach(), lambda y: {"a": y.mean()}])
def test_what_is_no_loss_under_that_name_is_none(make: Any) -> None:
    pipe = pipeline(Named(make), (_data(2)[0],), split_spec={"module.1": SplitPoint.BEGINNING})
    assert pipe.step_loss is None
    assert pipe.info().loss is None
