"""What a loss uses of the model besides its output."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.pipelining.models import PLAIN, TRANSFORMER
from tests.pipelining.running import cut, keyed
from torch import Tensor, nn
from torch.nn import functional

from partita.errors import ExecutionError
from partita.pipelining import Pipe, Schedule1F1B, UncutReference, pipeline
from partita.runtime import Comm, InProcessWorld

Loss = Callable[[Tensor, Tensor], Tensor]


def step_on(pipe: Pipe, ranks: int, loss: Loss) -> list[dict[str, Tensor]]:
    """The gradients that one step leaves on each rank."""

    def body(comm: Comm) -> dict[str, Tensor]:
        own = [index for index in range(pipe.num_stages) if index % ranks == comm.rank]
        stages = [pipe.build_stage(index, comm=comm) for index in own]
        args, _, target = PLAIN.data(4)
        Schedule1F1B(stages, 2, loss).step(*args, target=target)
        return {
            name: parameter.grad
            for stage in stages
            for name, parameter in stage.module.named_parameters()
            if parameter.grad is not None
        }

    return InProcessWorld(ranks).run(body)


@pytest.mark.parametrize("frontend", ["export", "modules"])
def test_a_penalty_on_weights_of_another_rank_is_refused(frontend: str) -> None:
    model = PLAIN.model()
    args, _, _ = PLAIN.data(2)
    pipe = pipeline(model, args, split_spec=PLAIN.split_spec(2), frontend=frontend, prove=False)

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) + sum(p.square().sum() for p in model.parameters())

    message = r"loss_fn uses 'a\.\w+', which stage 0 trains on another rank"
    with pytest.raises(ExecutionError, match=message):
        step_on(pipe, 2, penalised)


def test_weights_of_the_last_stage_and_of_the_loss_itself_are_used_as_they_are() -> None:
    model = PLAIN.model()
    args, _, _ = PLAIN.data(2)
    pipe = pipeline(model, args, split_spec=PLAIN.split_spec(2), prove=False)
    temperature = nn.Parameter(torch.ones(()))

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output * temperature, target) + model.d.weight.square().sum()

    step_on(pipe, 2, penalised)
    assert temperature.grad is not None


def test_a_rank_that_has_both_stages_may_use_all_weights() -> None:
    model = PLAIN.model()
    args, _, target = PLAIN.data(4)
    expected = copy.deepcopy(model)
    pipe = pipeline(model, (args[0][:2],), split_spec=PLAIN.split_spec(2), prove=False)

    def penalised(whole: nn.Module) -> Loss:
        return lambda output, target: functional.mse_loss(output, target) + whole.a.weight.square().sum()

    (gradients,) = step_on(pipe, 1, penalised(model))
    for x, y in zip(args[0].chunk(2), target.chunk(2), strict=True):
        (penalised(expected)(expected(x), y) / 2).backward()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)  # summed in another order


def test_a_tied_weight_is_of_both_stages() -> None:
    pipe, whole = cut(TRANSFORMER, 2), keyed(TRANSFORMER)
    args, _, target = TRANSFORMER.data(4)

    def penalised(module: nn.Module) -> Loss:
        weight = module.get_parameter("head.weight")
        return lambda output, target: TRANSFORMER.loss(output, target) + weight.square().sum()

    def body(comm: Comm) -> Tensor | None:
        stage = pipe.build_stage(comm.rank, comm=comm)
        loss = penalised(stage.module) if comm.rank else TRANSFORMER.loss
        Schedule1F1B(stage, 2, loss).step(*args, target=target)
        return stage.module.get_parameter("head.weight" if comm.rank else "embedding.weight").grad

    UncutReference(whole, 2, penalised(whole)).step(*args, target=target)
    expected = whole.get_parameter("embedding.weight").grad
    for gradient in InProcessWorld(2).run(body):
        assert gradient is not None
        assert torch.equal(gradient, expected)
