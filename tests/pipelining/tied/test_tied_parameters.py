"""Tensors that are trained and are no parameters: in one stage, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.errors import CaptureError
from partita.pipelining import ScheduleGPipe, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld

WIDTH, MICROBATCHES = 4, 2
CUTS = {"b": SplitPoint.BEGINNING, "c": SplitPoint.BEGINNING}
SHARE = "requires gradients, is no parameter of the model, and stages 1 and 2 use it"


class Scaled(nn.Module):
    """Multiplies by a tensor in its middle and, where ``twice``, at its end."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.twice = twice
        self.hold(torch.ones(WIDTH, requires_grad=True))

    def hold(self, scale: Tensor) -> None:
        self.register_buffer("scale", scale)

    def scaling(self) -> Tensor:
        scale: Any = self.scale
        return scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x)) * self.scaling()
        x = self.c(x)
        return x * self.scaling() if self.twice else x


class InAttribute(Scaled):
    def hold(self, scale: Tensor) -> None:
        self.scale = scale


class InList(Scaled):
    def hold(self, scale: Tensor) -> None:
        self.scales = [scale]

    def scaling(self) -> Tensor:
        return self.scales[0]


class ParameterInList(InList):
    """Which no optimizer of ``model.parameters()`` sees, and which has a gradient in eager."""

    def hold(self, scale: Tensor) -> None:
        super().hold(nn.Parameter(scale.detach()))


class ModuleInList(Scaled):
    def hold(self, scale: Tensor) -> None:
        module = nn.Module()
        module.scale = nn.Parameter(scale.detach())
        self.modules_apart = [module]

    def scaling(self) -> Tensor:
        scale: Any = self.modules_apart[0].scale
        return scale


class InClosure(Scaled):
    def hold(self, scale: Tensor) -> None:
        self.scaled = lambda: scale

    def scaling(self) -> Tensor:
        return self.scaled()


class AsParameter(Scaled):
    def hold(self, scale: Tensor) -> None:
        self.scale = nn.Parameter(scale.detach())


class RequiredInForward(Scaled):
    """Lets its buffer require gradients in stage 0, and uses it in stage 1."""

    def hold(self, scale: Tensor) -> None:
        self.register_buffer("scale", scale.detach())

    def forward(self, x: Tensor) -> Tensor:
        self.scaling().requires_grad_()
        return super().forward(x)


def loss_of(output: Tensor, _target: object = None) -> Tensor:
    return output.square().mean()


def batch() -> Tensor:
    return torch.randn(MICROBATCHES * 2, WIDTH, generator=torch.Generator().manual_seed(1))


def gradient_in_eager(model: Scaled) -> Tensor | None:
    for part in batch().chunk(MICROBATCHES):
        (loss_of(model(part)) / MICROBATCHES).backward()
    gradient, model.scaling().grad = model.scaling().grad, None
    return gradient


@pytest.mark.parametrize(
    ("model", "frontend"),
    [
        (Scaled(), "export"),
        (InAttribute(), "export"),
        (InList(), "export"),
        (ParameterInList(), "export"),
        (ModuleInList(), "export"),
        (InClosure(), "export"),
        (Scaled(), "modules"),
        (InAttribute(), "modules"),
        (InList(), "modules"),
        (ParameterInList(), "modules"),
        (ModuleInList(), "modules"),
        (InClosure(), "modules"),
        (AsParameter(twice=True), "export"),
        (AsParameter(twice=True), "modules"),
    ],
)
def test_a_tensor_of_one_stage_and_a_parameter_of_two_get_the_models_gradient(
    model: Scaled, frontend: Any
) -> None:
    """``torch.export`` detaches what is in an attribute, without a word where warnings are off."""
    expected = gradient_in_eager(model)
    pipe = pipeline(model, (batch()[:2],), split_spec=CUTS, frontend=frontend)

    def train(comm: Comm) -> Tensor | None:
        stage: Any = pipe.build_stage(comm.rank, comm=comm)
        ScheduleGPipe(stage, MICROBATCHES, loss_of).step(batch())
        assert not any("lifted" in name for name, _ in stage.module.named_parameters())
        return model.scaling().grad if comm.rank == 1 else None

    gradient = InProcessWorld(3).run(train)[1]
    assert gradient is not None
    assert expected is not None
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    ("model", "frontend"),
    [
        (Scaled(twice=True), "export"),
        (InAttribute(twice=True), "export"),
        (InList(twice=True), "export"),
        (ParameterInList(twice=True), "export"),
        (ModuleInList(twice=True), "export"),
        (Scaled(twice=True), "modules"),
        (InAttribute(twice=True), "modules"),
        (InList(twice=True), "modules"),
        (ModuleInList(twice=True), "modules"),
    ],
)
def test_a_trained_tensor_that_is_no_parameter_is_not_shared(model: Scaled, frontend: Any) -> None:
    """Each stage had its own share of the gradient, and no stage had the sum."""
    with pytest.raises(CaptureError, match=SHARE):
        pipeline(model, (batch()[:2],), split_spec=CUTS, frontend=frontend)


def test_a_buffer_that_another_stage_lets_require_gradients_is_refused() -> None:
    """The stage that used it had none, since another stage's copy required it."""
    with pytest.raises(CaptureError, match=r"buffers \('scale'\) and runs in stages 0 and 1"):
        pipeline(RequiredInForward(), (batch()[:2],), split_spec=CUTS, frontend="modules")
