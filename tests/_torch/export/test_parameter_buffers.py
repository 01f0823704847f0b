from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.capture import capture
from partita.pipelining import Schedule1F1B, SplitPoint, pipeline
from partita.runtime import Comm, InProcessWorld


class Scales(nn.Module):
    def __init__(self, scale: nn.Parameter, *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", scale, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * self.get_buffer("scale")


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_a_buffer_that_is_a_parameter_stays_the_models_own_buffer(*, trained: bool, persistent: bool) -> None:
    """It was a parameter; where it is not persistent, or two modules have it, torch.export raised."""
    scale = nn.Parameter(torch.randn(4), requires_grad=trained)
    model = nn.Sequential(*(Scales(scale, persistent=persistent) for _ in range(2)))
    graph = capture(model, (torch.randn(2, 4),), prove=True).module
    assert dict(graph.named_buffers())["0.scale"] is scale is model.get_buffer("0.scale")
    assert [name for name, _ in graph.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(graph.state_dict()) == list(model.state_dict())
    partita.verify(graph, model, (torch.randn(2, 4),)).check()


def test_a_stage_does_not_train_what_the_model_does_not() -> None:
    """An optimizer of the stage's parameters stepped it, and one of ``model.parameters()`` does not."""
    model = nn.Sequential(nn.Linear(4, 4), Scales(nn.Parameter(torch.randn(4))))
    before = model.get_buffer("1.scale").clone()
    pipe = pipeline(model, (torch.randn(2, 4),), split_spec={"0": SplitPoint.END})
    x, target = torch.randn(4, 4), torch.randn(4, 4)

    def train(comm: Comm) -> None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        Schedule1F1B(stage, 2, nn.functional.mse_loss).step(x, target=target)
        torch.optim.SGD(stage.module.parameters(), lr=1.0).step()

    InProcessWorld(2).run(train)
    scale = model.get_buffer("1.scale")
    assert torch.equal(scale, before)
    assert scale.grad is not None
